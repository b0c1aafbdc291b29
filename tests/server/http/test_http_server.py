"""uvicorn as the server runs it: it tells when the port is open, and leaves signals to others."""

import asyncio
import logging
import signal
import socket

import httpx
from fastapi import FastAPI

from jaxspec.server.http.http_server import HttpServer, event_loop, set_up_log
from jaxspec.server.options import ServerOptions


def app_of(answering, answered):
    app = FastAPI()

    @app.get("/")
    async def answer():
        answering.set()
        await asyncio.sleep(0.5)
        answered.set()
        return "done"

    return app


def is_answered(now):
    """Whether a request gets its answer that is being answered when the server ends."""

    async def run():
        answering, answered, opened = (asyncio.Event() for _ in range(3))
        server = HttpServer(app_of(answering, answered), ServerOptions())
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve_at(port, opened.set))
            async with asyncio.timeout(30):
                await opened.wait()
                assert handlers == [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
                async with httpx.AsyncClient() as client:
                    root = f"http://127.0.0.1:{port.getsockname()[1]}"
                    asked = asyncio.create_task(client.get(root))
                    await answering.wait()
                    server.end(now=now)
                    await serving
                    found = answered.is_set()
                    await asyncio.wait([asked])
                    return found

    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(run())


def test_what_is_being_answered_is_answered_unless_it_ends_at_once():
    assert is_answered(now=False)
    assert not is_answered(now=True)


def test_the_log_is_uvicorn_s_where_there_is_none(monkeypatch):
    logger = logging.getLogger("uvicorn")
    monkeypatch.setattr(logger, "handlers", [])
    set_up_log()
    assert logger.handlers and logger.level == logging.INFO
