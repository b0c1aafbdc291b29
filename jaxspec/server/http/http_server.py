"""HttpServer: uvicorn without its signal handlers; also logging and event loop setup."""

import asyncio
import contextlib
import functools
import logging.config
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from jaxspec.server.http.bounded_protocol import BoundedProtocol, ConnectionCounts
from jaxspec.server.options import ServerOptions

_CLOSING = 5  # seconds for connections to send their last bytes


class HttpServer(uvicorn.Server):
    """Serves an app until `end` is called."""

    def __init__(self, app: FastAPI, options: ServerOptions):
        counts = ConnectionCounts(options.limit_concurrency, options.limit_concurrency_per_address)
        protocol = functools.partial(BoundedProtocol, options=options, counts=counts)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # pyright: ignore[reportArgumentType]
                log_level="info",
                access_log=options.access_log,
                timeout_graceful_shutdown=_CLOSING,
                ws="none",
                lifespan="off",
            )
        )
        self._on_start: Callable[[], None] = lambda: None

    async def serve_at(self, port: socket.socket, on_start: Callable[[], None]) -> None:
        """Open the bound socket `port`, call `on_start`, and serve until `end`."""
        self._on_start = on_start
        await self.serve([port])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: the engine's process handles signals and drains requests first."""
        yield

    def end(self, *, now: bool = False) -> None:
        """Finish the requests in progress, or drop them if `now`, and return from `serve`."""
        self.force_exit = self.force_exit or now
        self.should_exit = True


def set_up_log() -> None:
    """Configure logging as uvicorn does, in a process without an `HttpServer`."""
    logging.config.dictConfig(LOGGING_CONFIG)


def event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop if installed (2/3 of the time per chunk), else asyncio's."""
    try:
        import uvloop
    except ImportError:  # uvloop has no wheels for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
