"""The app: all routes around one `AsyncLLM`, and what stands before them."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from jaxspec.async_llm import AsyncLLM
from jaxspec.server.access import RequireKey
from jaxspec.server.connection import ClientConnection
from jaxspec.server.endpoints import (
    chat,
    completions,
    figures,
    health,
    messages,
    metrics,
    models,
    page,
    responses,
    tokens,
)
from jaxspec.server.errors import ENGINE_ERRORS, ApiError, respond
from jaxspec.server.figures import Figures
from jaxspec.server.options import ServerOptions
from jaxspec.server.request_ids import RequestIds
from jaxspec.server.service import Service
from jaxspec.server.snapshot import LocalWatch
from jaxspec.server.version import version

_ASKED = (models, completions, chat, messages, responses, tokens)  # by clients
_WATCHED = (health, metrics, figures, page)  # by people and by what watches


def make_app(llm: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """The ASGI app that serves `llm`, an engine of this process; raises as `app_of`."""
    figures = Figures()
    return app_of(Service(llm, options or ServerOptions(), figures, LocalWatch(llm, figures)))


def app_of(service: Service) -> FastAPI:
    """The ASGI app of a service; `app.state.service` is what its routes share.

    Raises:
        ValueError: the model has no tokenizer, or the file of keys can't be read.
    """
    options = service.options
    before = [
        Middleware(RequestIds),
        Middleware(RequireKey, keys=options.keys(), protect_metrics=options.protect_metrics),
        Middleware(ClientConnection, max_body_bytes=options.max_body_mib * 2**20),
    ]
    if options.allowed_origins:
        origins = list(options.allowed_origins)
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
        before.insert(0, cors)
    errors = (ApiError, HTTPException, RequestValidationError, *ENGINE_ERRORS, Exception)
    app = FastAPI(
        title="jaxspec",
        version=version(),
        middleware=before,
        exception_handlers=dict.fromkeys(errors, respond),
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    for family in _ASKED + _WATCHED:
        app.include_router(family.router)
    return app
