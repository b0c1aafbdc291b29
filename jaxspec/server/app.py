"""ASGI app with all routes and middleware around one engine."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.flight.about import VERSION
from jaxspec.server.endpoints import (
    chat,
    completions,
    control,
    monitoring,
    rollouts,
    tokens,
    tokens_in,
    translated,
)
from jaxspec.server.generation.service import Service
from jaxspec.server.http.access import RequireKey
from jaxspec.server.http.connection import ClientConnection
from jaxspec.server.http.errors import ENGINE_ERRORS, ApiError, respond
from jaxspec.server.http.request_ids import RequestIds
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.metrics.snapshot import LocalWatch
from jaxspec.server.options import ServerOptions

_ENDPOINTS = (completions, chat, translated, tokens, tokens_in, control, monitoring)


def make_app(llm: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """Return the ASGI app that serves `llm`, an engine in this process.

    Raises:
        ValueError: the model has no tokenizer, or the file of keys can't be read.
    """
    metrics = ServerMetrics()
    return app_of(Service(llm, options or ServerOptions(), metrics, LocalWatch(llm, metrics)))


def app_of(service: Service) -> FastAPI:
    """Return the ASGI app of a service, which its routes read from `app.state.service`.

    Raises:
        ValueError: the file of keys can't be read, or holds no key.
    """
    errors = (ApiError, HTTPException, RequestValidationError, *ENGINE_ERRORS, Exception)
    app = FastAPI(
        title="jaxspec",
        version=VERSION,
        middleware=[Middleware(RequestIds), *guards(service.options)],
        exception_handlers=dict.fromkeys(errors, respond),
        docs_url=None,  # the page would load scripts from a CDN
        redoc_url=None,
    )
    app.state.service = service
    for endpoints in _ENDPOINTS:
        app.include_router(endpoints.router)
    if service.options.enable_rollouts:
        app.include_router(rollouts.router)
    return app


def guards(options: ServerOptions) -> list[Middleware]:
    """Return the middleware that admits a request: its origin, its key, then its body.

    Raises:
        ValueError: the file of keys can't be read, or holds no key.
    """
    found = [
        Middleware(RequireKey, keys=options.keys(), protect_metrics=options.protect_metrics),
        Middleware(ClientConnection, max_body_bytes=options.max_body_mib * 2**20),
    ]
    if options.allowed_origins:
        origins = list(options.allowed_origins)
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
        found.insert(0, cors)
    return found
