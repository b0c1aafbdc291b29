"""Error responses: HTTP status and error object, from any exception."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxspec.checks import PromptTooLongError, shown
from jaxspec.engine.errors import (
    DrainingError,
    EngineDeadError,
    NoReplicaError,
    PausedError,
    QueueFullError,
    QueueTimeoutError,
    ReplicaDiedError,
)
from jaxspec.server.translate import FieldError, anthropic

_MAX_MESSAGE = 2000  # characters
_MAX_FAULTS = 10  # maximum number of validation errors in a message
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# Names of union members in pydantic's error locations, which could be names of fields.
_MEMBERS = frozenset({"str", "int", "float", "bool", "list", "dict"})
# Status of each engine error, and the seconds of its Retry-After header.
ENGINE_ERRORS: dict[type[Exception], tuple[int, int | None]] = {
    QueueFullError: (503, 1),
    DrainingError: (503, 8),
    EngineDeadError: (503, 8),
    ReplicaDiedError: (503, 1),
    NoReplicaError: (503, 8),
    PausedError: (503, 1),
    QueueTimeoutError: (408, None),
}


class ApiError(Exception):
    """Error response to a request.

    `param` is the dotted path of the invalid field. `code` is a word of OpenAI's API for the error;
    None means the status. `headers` are sent with the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @staticmethod
    def of(error: Exception) -> "ApiError":
        """Convert any exception; internal errors reveal no details to the client."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestValidationError):
            return _of_faults(error.errors())
        if isinstance(error, ValidationError):  # of a body converted from another API
            faults = error.errors(include_url=False, include_context=False)
            return _of_faults([{**fault, "loc": ("body", *fault["loc"])} for fault in faults])
        if isinstance(error, HTTPException):
            return ApiError(error.status_code, _http_message(error), headers=error.headers)
        for kind, (status, seconds) in ENGINE_ERRORS.items():
            if isinstance(error, kind):
                wait = {} if seconds is None else {"retry-after": str(seconds)}
                return ApiError(status, str(error), headers=wait)
        return ApiError(500, "The server failed on this request; its log says why.")

    @staticmethod
    def of_value(error: ValueError | TypeError, fields: Collection[str] = ()) -> "ApiError":
        """Return the 400 for a value that was refused.

        `param` is the first word of the message, if `error` is a FieldError or that word is one of
        `fields`, or a path inside of one.
        """
        if isinstance(error, ValidationError):
            return ApiError.of(error)
        message = str(error)
        if isinstance(error, PromptTooLongError):
            return ApiError(400, message, code="context_length_exceeded")
        first = message.partition(" ")[0]
        if isinstance(error, FieldError) or first.partition(".")[0] in fields:
            return ApiError(400, message, param=first)
        return ApiError(400, message)

    def as_object(self) -> dict[str, Any]:
        """Return OpenAI's error object, with a bounded message."""
        message = self.message
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE - 3]}..."
        kind = _TYPES.get(self.status, _TYPES[400 if self.status < 500 else 500])
        error = {
            "message": message,
            "type": kind,
            "param": self.param,
            "code": self.code or self.status,
        }
        return {"error": error}

    def response(self, path: str) -> Response:
        """Return the response, in the format of the API that `path` belongs to."""
        content = self.as_object()
        if path.startswith("/v1/messages"):
            content = anthropic.error(self.status, content["error"]["message"])
        return json_response(content, self.status, self.headers)


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response; NaN and infinities become null."""
    body = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers, media_type="application/json")


async def respond(request: Request, error: Exception) -> Response:
    """Handle all exceptions of the app."""
    return ApiError.of(error).response(request.scope["path"])


def _http_message(error: HTTPException) -> str:
    """Return the message of a router or parser error, with advice for 404 and 405."""
    if error.status_code == 404:
        return "There is no such route. docs/serving.md lists those that there are."
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another")
        return f"This route takes the method {allowed}."
    return str(error.detail)


def _of_faults(faults: Sequence[Any]) -> ApiError:
    """Return the 400 for a body that its model refuses, from pydantic's list of errors."""
    found = [_fault(fault) for fault in faults[:_MAX_FAULTS]]
    if len(faults) > _MAX_FAULTS:
        found.append(f"and {len(faults) - _MAX_FAULTS:,} more")
    return ApiError(400, "; ".join(found) + ".", param=_place(faults[0]) or None)


def _fault(fault: Mapping[str, Any]) -> str:
    place, kind = _place(fault), fault["type"]
    if kind == "json_invalid":
        return f"The body must be JSON, and is not: {fault['ctx']['error']}"
    if kind == "missing" and place:
        return f"{place} must be given"
    said = fault["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{place}: {said}" if place else said
    said = said.replace("Input should be", "must be", 1)
    return f"{place or 'The body'} {said}, got {shown(fault.get('input'))}"


def _place(fault: Mapping[str, Any]) -> str:
    """Return the dotted path of a fault, without pydantic's names of union members."""
    if fault["type"] == "json_invalid":
        return ""
    first, *rest = [*map(str, fault["loc"][1:]), ""]
    steps = [first, *(step for step in rest if step not in _MEMBERS)]
    return ".".join(step for step in steps if step.isidentifier() or step.isdigit())
