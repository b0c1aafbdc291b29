"""Connection middleware: limits request bodies, names their clients, ends work of those that go."""

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.api.fair_pool import CALLER, Caller
from jaxspec.checks import shown
from jaxspec.server.http.access import client_of
from jaxspec.server.http.errors import ApiError
from jaxspec.server.http.request_ids import LOG, named

_BODY_SECONDS = 60.0


class ClientConnection:
    """Reads the whole body, then runs `app` until it is done or the client disconnects.

    ASGI reports a disconnect only to a pending `receive`, and only this middleware waits for it.
    Without it, answers that are not streamed would be completed after the client has gone.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_seconds: float = _BODY_SECONDS):
        """Limit the size of bodies in bytes and the time to receive one in seconds."""
        self._app, self._max, self._seconds = app, max_body_bytes, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._body(scope, receive)
        except TimeoutError:
            error = ApiError(
                408,
                f"A body must be there within {self._seconds:g} seconds, and this one is not. Send "
                "it again.",
                headers={"connection": "close"},
            )
            await error.response(scope["path"])(scope, receive, send)
            return
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if body is not None:
            CALLER.set(Caller(client_of(scope), len(body)))  # of this request's task
            await _while_connected(self._app, scope, receive, send, body)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None after a disconnect.

        Raises:
            ApiError: 413, it is too long; 415, it is compressed.
        """
        coding = Headers(scope=scope).get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise ApiError(
                415,
                f"content-encoding must be absent or identity, got {shown(coding)}. Send the body "
                "uncompressed.",
                headers={"connection": "close", "accept-encoding": "identity"},
            )
        given = Headers(scope=scope).get("content-length", "0")
        length, parts = int(given) if given.isdecimal() and len(given) < 19 else 0, list[bytes]()
        is_over, more = length > self._max, True
        # A body up to twice the limit is read to its end and dropped: a client that is still
        # sending when the connection closes never sees the 413.
        unread = 2 * self._max
        while more and not (is_over and (unread <= 0 or length > 2 * self._max)):
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            unread -= len(part)
            is_over |= unread < self._max
            parts.append(part)
            if is_over:
                parts.clear()
        if is_over:
            raise ApiError(
                413,
                f"A body must have at most {self._max:,} bytes, and this one has more. Send less, "
                "or start the server with a larger --max-body-mib.",
                headers={"connection": "close"},
            )
        return b"".join(parts)


async def _while_connected(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, body: bytes
) -> None:
    """Run `app` on a received body; cancel it if the client disconnects first."""
    gone, is_read, is_answered = asyncio.Event(), False, False

    async def next_message() -> Message:
        nonlocal is_read
        if is_read:
            await gone.wait()
            return {"type": "http.disconnect"}
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def note_end(message: Message) -> None:
        nonlocal is_answered
        is_answered |= message["type"] == "http.response.body" and not message.get("more_body")
        await send(message)

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work = asyncio.ensure_future(app(scope, next_message, note_end))
    listening = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({work, listening}, return_when=asyncio.FIRST_COMPLETED)
        gone.set()
        if not is_answered and not work.done():
            LOG.info("%s: 499, the client went.", named(scope))
            work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    finally:
        work.cancel()
        listening.cancel()
        await asyncio.wait({work, listening})
