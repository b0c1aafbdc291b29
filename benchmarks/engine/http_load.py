"""Asks a server for completions and times what comes: a process of its own, for it costs little.

`main` reads jobs from the standard input, a line of JSON each, and answers each with a line. A job
has a port, the bodies of requests, and how many are asked for at a time, each by a connection that
is kept. Chunks are kept as they come, and read when all is over.
"""

import asyncio
import collections
import dataclasses
import gc
import json
import re
import sys
import time
from typing import Any

_END = b"0\r\n\r\n"  # of an answer in chunks
_TEXT = b'"text":'  # in each chunk that has tokens
_COUNT = re.compile(rb'"completion_tokens":(\d+)')


@dataclasses.dataclass
class Answer:
    """What came for a request, and when (`time.monotonic`)."""

    sent: float
    parts: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)

    def read(self) -> tuple[list[float], int]:
        """When portions of text came, and of how many tokens they are.

        Raises:
            RuntimeError: the answer is not whole.
        """
        text = b"".join(data for _, data in self.parts)
        count = _COUNT.search(text)
        if count is None or b'"finish_reason":"length"' not in text:
            raise RuntimeError(f"A request ended early: {text[-500:]!r}")
        return [now for now, data in self.parts if _TEXT in data], int(count[1])


class Place(asyncio.Protocol):
    """A connection, with one request at a time."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._tail = transport, b""
        self._is_over: asyncio.Future[None] | None = None  # None: nothing was asked for yet

    async def ask(self, request: bytes) -> Answer:
        """The answer to a whole request.

        Raises:
            RuntimeError: it is an error, or the connection ended.
        """
        self._is_over = is_over = asyncio.get_running_loop().create_future()
        self._answer = answer = Answer(time.monotonic())
        self._transport.write(request)
        await is_over
        return answer

    def data_received(self, data: bytes) -> None:
        assert self._is_over is not None
        parts = self._answer.parts
        if not parts and not data.startswith(b"HTTP/1.1 200"):
            self._is_over.set_exception(RuntimeError(f"The server refuses: {data[:500]!r}"))
            return
        parts.append((time.monotonic(), data))
        self._tail = (self._tail + data[-len(_END) :])[-len(_END) :]
        if self._tail == _END:
            self._is_over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_over is not None and not self._is_over.done():
            self._is_over.set_exception(RuntimeError(f"The connection ended: {error}"))


async def ask_all(port: int, bodies: list[dict[str, Any]], at_once: int) -> dict[str, Any]:
    """Ask for all of `bodies` in their order, `at_once` at a time; times in seconds."""
    loop, queue = asyncio.get_running_loop(), collections.deque(map(_request, bodies))
    made = [await loop.create_connection(Place, "127.0.0.1", port) for _ in range(at_once)]
    answers: list[Answer] = []

    async def work(place: Place) -> None:
        while queue:
            answers.append(await place.ask(queue.popleft()))

    gc.disable()
    begin, cpu = time.monotonic(), time.process_time()
    try:
        async with asyncio.TaskGroup() as group:
            for _, place in made:
                group.create_task(work(place))
        cpu = time.process_time() - cpu
    finally:
        gc.enable()
        for transport, _ in made:
            transport.close()
    read = [answer.read() for answer in answers]
    return {
        "seconds": max(times[-1] for times, _ in read) - begin,
        "tokens": sum(count for _, count in read),
        "ttft": [times[0] - a.sent for (times, _), a in zip(read, answers, strict=True)],
        "gaps": [b - a for times, _ in read for a, b in zip(times, times[1:], strict=False)],
        "cpu_seconds": cpu,
    }


def _request(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text


def main() -> None:
    try:
        import uvloop
    except ImportError:  # it comes with the server, which may do without
        make_loop = asyncio.new_event_loop
    else:
        make_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        for line in sys.stdin:
            print(json.dumps(runner.run(ask_all(**json.loads(line)))), flush=True)
