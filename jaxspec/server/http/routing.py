"""Routes with JSON bodies parsed by orjson: no NaN, no lone surrogates, bounded depth."""

import functools
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from jaxspec.api.fair_pool import LONG_BYTES
from jaxspec.server.http.errors import ApiError


class _Request(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LONG_BYTES:
            return orjson.loads(body)
        return await self.app.state.service.llm.prepare(functools.partial(orjson.loads, body))


class _Route(APIRoute):
    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            # Pages of other origins can send other content types without a CORS preflight.
            kind = request.headers.get("content-type", "").partition(";")[0]
            if self.body_field is not None and kind.strip().lower() != "application/json":
                raise ApiError(
                    415,
                    f"The body must be JSON and say so, got content-type {kind[:80]!r}. Send the "
                    "header 'content-type: application/json'.",
                )
            return await handle(_Request(request.scope, request.receive))

        return handle_json


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


_ERRORS = (400, 401, 404, 408, 413, 415, 422, 500, 503)


def make_router() -> APIRouter:
    """Return a router of such routes, with error responses in its OpenAPI schema."""
    return APIRouter(
        route_class=_Route,
        responses={status: {"model": ErrorObject} for status in _ERRORS},
    )
