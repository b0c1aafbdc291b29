"""Server-sent events: chunks built as bytes, and the streaming response that sends them.

Sending dominates the cost of a chunk; JSON shared by all chunks is serialized once per answer.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(content: Any, name: str | None = None) -> bytes:
    """Return one event: `content` as JSON, with an optional event name."""
    data = b"data: " + orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class Chunks:
    """Chunks of one answer; their common fields are serialized once."""

    def __init__(self, **shared: Any):
        """`shared`: fields of every chunk, such as id, object, created and model."""
        self._head = b"data: " + orjson.dumps(shared)[:-1] + b',"choices":['

    def chunk(self, choice: bytes, usage: Mapping[str, Any] | None = None, **fields: Any) -> bytes:
        """Return one event with a choice in JSON; empty bytes mean no choice.

        `fields`: further fields beside the choices.
        """
        extra = b"" if usage is None else b',"usage":' + orjson.dumps(usage)
        if fields:
            extra += b"," + orjson.dumps(fields)[1:-1]
        return b"".join((self._head, choice, b"]", extra, b"}\n\n"))


class EventStream(Response):
    """Response that streams server-sent events.

    Without output for `keep_alive` seconds, a comment is sent, since proxies close idle
    connections. If a send blocks for `stall_timeout` seconds, the stream is cancelled.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keep_alive: float,
        stall_timeout: float,
    ):
        """Send `events`, which are closed at the end in all cases."""
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]  # unknown in advance
        self._events, self._keep_alive, self._stall = events, keep_alive, stall_timeout
        self._sent_at, self._is_sending = 0.0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        watch = None
        async with contextlib.aclosing(self._events) as events:
            try:
                await send(start)
                watch = asyncio.create_task(self._watch(send, asyncio.current_task()))
                async for data in events:
                    self._sent_at, self._is_sending = time.monotonic(), True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._is_sending = False
            finally:
                if watch is not None:
                    watch.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _watch(self, send: Send, sender: asyncio.Task | None) -> None:
        """Send keep-alives and detect stalls: one task per stream, no timer per chunk."""
        assert sender is not None
        interval = min(self._keep_alive, self._stall)
        while True:
            await asyncio.sleep(interval)
            silent = time.monotonic() - self._sent_at
            if self._is_sending and silent >= self._stall:
                sender.cancel()
                return
            if not self._is_sending and silent >= self._keep_alive:
                try:
                    async with asyncio.timeout(self._stall):
                        await send(
                            {"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True}
                        )
                except TimeoutError:
                    sender.cancel()
                    return
