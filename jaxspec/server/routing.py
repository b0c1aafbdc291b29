"""Routes whose bodies are JSON as orjson reads it: no NaN, no half characters, bounded depth."""

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from jaxspec.server.errors import ApiError


class _Request(Request):
    async def json(self) -> Any:
        return orjson.loads(await self.body())


class _Route(APIRoute):
    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            # A web page of another origin may send a body without a type, and asks nobody first.
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
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


_ERRORS = (400, 401, 404, 408, 413, 415, 422, 500, 503)


def make_router() -> APIRouter:
    """A router of such routes; the OpenAPI document says what their errors look like."""
    return APIRouter(
        route_class=_Route,
        responses={status: {"model": ErrorObject} for status in _ERRORS},
    )
