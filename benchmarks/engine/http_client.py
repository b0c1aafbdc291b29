"""A client of the load generator for a server, and processes that serve."""

import dataclasses
import gc
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.engine.load_generator import Client, Event, Request

SECONDS_TO_START = 600.0
SECONDS_TO_END = 30.0
_OK = b"HTTP/1.1 200"
_END = b"0\r\n\r\n"  # of an answer in chunks
_TEXT = b'"text":'  # in each chunk that has tokens
_COUNT = re.compile(rb'"completion_tokens":(\d+)')


def body(request: Request) -> dict[str, Any]:
    """Return the body of a streamed completion of a request."""
    return {
        "prompt": request.prompt,
        "max_tokens": request.tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **request.sampling,
    }


@dataclasses.dataclass(eq=False)
class _Connection:
    """A connection that serves one request at a time and stays open between them."""

    socket: socket.socket
    index: int = 0
    received: bytearray = dataclasses.field(default_factory=bytearray)


class HTTPClient(Client):
    """Sends streamed completions to a server on this machine, without garbage collection."""

    def __init__(self, port: int, bodies: Sequence[dict[str, Any]], connections: int = 0):
        """Open `connections` connections; more are opened when needed."""
        self._port, self._requests = port, [_request(each) for each in bodies]
        self._selector = selectors.DefaultSelector()
        self._free = [self._connect() for _ in range(connections)]

    def __enter__(self) -> Self:
        gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        gc.enable()
        for key in tuple(self._selector.get_map().values()):
            key.data.socket.close()
        self._selector.close()

    def send(self, index: int, due: float) -> None:
        del due
        connection = self._free.pop() if self._free else self._connect()
        connection.index = index
        connection.received.clear()
        connection.socket.sendall(self._requests[index])

    def receive(self, until: float | None) -> Iterable[Event]:
        """Read what has arrived.

        Raises:
            RuntimeError: a request was refused or ended early, or a connection ended.
        """
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            yield from self._read(key.data)

    def _read(self, connection: _Connection) -> Iterable[Event]:
        data, now = connection.socket.recv(2**18), time.monotonic()
        if not data and connection in self._free:  # the server closes idle connections
            self._free.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()
            return
        if not data:
            raise RuntimeError("The connection ended before the answer.")
        received = connection.received
        received += data
        if not received.startswith(_OK[: len(received)]):
            raise RuntimeError(f"The server refuses: {bytes(received[:500])!r}")
        if _TEXT in data:
            yield Event(connection.index, now)
        if received.endswith(_END):
            count = _COUNT.search(received)
            if count is None or b'"finish_reason":"length"' not in received:
                raise RuntimeError(f"A request ended early: {bytes(received[-500:])!r}")
            self._free.append(connection)
            yield Event(connection.index, None, int(count[1]))

    def _connect(self) -> _Connection:
        connection = _Connection(socket.create_connection(("127.0.0.1", self._port)))
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection


def _request(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A process that serves on `port`, which it is given in its command."""

    def __init__(self, command: Sequence[str], port: int, seconds: float, **options: Any):
        """Start it and wait until it serves; `options` are of `subprocess.Popen`.

        Raises:
            RuntimeError: it ended, or does not serve within `seconds`.
        """
        self.port = port
        self._process = subprocess.Popen(command, text=True, **options)
        try:
            self._wait(seconds)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, by force if it takes too long."""
        self._process.terminate()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        if self._process.poll() is not None:
            raise RuntimeError("The server ended before it served; its output is above.")
        raise RuntimeError(f"The server did not start within {seconds:g} seconds.")


class WatchedServer(ServerProcess):
    """`http_server.py`, which measures its host between `begin` and `end`."""

    def __init__(self, folder: Path, llm_options: dict[str, Any], **options: Any):
        """`options`: of the server."""
        port = free_port()
        options = {"access_log": False, "port": port, **options}
        given = [json.dumps(each, default=os.fspath) for each in (llm_options, options)]
        code = "from benchmarks.engine.http_server import main; main()"
        command = [sys.executable, "-c", code, str(folder), *given]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__(command, port, SECONDS_TO_START, **pipes)

    def begin(self, switch_ms: float | None = None) -> None:
        """`switch_ms`: time that a thread may keep Python's lock; None leaves it."""
        words = "begin" if switch_ms is None else f"begin {switch_ms}"
        print(words, file=self._process.stdin, flush=True)

    def end(self) -> dict[str, Any]:
        """Return the measurements since `begin`.

        Raises:
            RuntimeError: the process ended.
        """
        print("end", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The server ended with {self._process.wait()}.")
        return json.loads(answer)
