"""Request ids: the name under which a client and the log speak of one request."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SOUND = re.compile(r"[A-Za-z0-9._-]{1,64}")


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
        request_id = given if _SOUND.fullmatch(given) else uuid.uuid4().hex

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("x-request-id", request_id)
            await send(message)

        await self._app(scope, receive, send_named)
