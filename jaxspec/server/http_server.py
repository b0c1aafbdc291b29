"""HttpServer: uvicorn around the app, without signal handlers of its own."""

import asyncio
import contextlib
import logging.config
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from jaxspec.server.options import ServerOptions

_CLOSING = 5  # seconds that connections get to send their last bytes


class HttpServer(uvicorn.Server):
    """Serves an app until it is ended."""

    def __init__(self, app: FastAPI, options: ServerOptions):
        """Serve `app`, once `serve_at` is called."""
        super().__init__(
            uvicorn.Config(
                app,
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
        """Open the port, and say so."""
        await super().startup(sockets)
        self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the engine's process, which lets running requests end first."""
        yield

    def end(self, *, now: bool = False) -> None:
        """Answer what is being answered, or not even that, and return from `serve`."""
        self.force_exit = self.force_exit or now
        self.should_exit = True


def set_up_log() -> None:
    """Have the log written as uvicorn does, in a process that has no `HttpServer`."""
    logging.config.dictConfig(LOGGING_CONFIG)


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which takes two thirds of the time for a chunk; asyncio's where there is none."""
    try:
        import uvloop
    except ImportError:  # it has no wheels for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
