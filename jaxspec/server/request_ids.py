"""Request ids: the name under which a client and the log speak of one request."""

import logging
import re
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.ids import new_id

LOG = logging.getLogger("uvicorn.error")
"""Where all of the server tells of itself: uvicorn's configuration drops what others say."""
_SOUND = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = "jaxspec.request_id"  # of a scope
_MAX_PATH = 200  # characters that the log tells


class RequestIds:
    """Answers with the X-Request-Id that came, or with a new one."""

    def __init__(self, app: ASGIApp):
        """Name the requests to `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its id back."""
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
    """A request in a line of the log: its method, path and id."""
    path = quote(scope["path"])[:_MAX_PATH]  # a line break in it would forge lines
    return f"{scope['method']} {path} (request {scope.get(_KEY, 'without an id')})"
