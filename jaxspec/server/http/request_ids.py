"""Request ids, shared by the client (X-Request-Id) and the server's log."""

import logging
import re
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.translate.fields import new_id

LOG = logging.getLogger("uvicorn.error")
"""Logger of the whole server: uvicorn configures only its own loggers."""
_SOUND = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = "jaxspec.request_id"  # key in an ASGI scope
_MAX_PATH = 200  # characters of a path in the log


class RequestIds:
    """Middleware that returns the request's X-Request-Id, or a new one if absent or malformed."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SOUND.fullmatch(given) else new_id("")
        scope[_KEY] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("x-request-id", request_id)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            LOG.error("%s: 500, and what follows says why.", named(scope))
            raise


def named(scope: Scope) -> str:
    """Format a request's method, path and id for the log."""
    path = quote(scope["path"])[:_MAX_PATH]  # quoted: a line break could forge log lines
    return f"{scope['method']} {path} (request {scope.get(_KEY, 'without an id')})"
