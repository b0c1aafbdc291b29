"""A server in a thread of its own, on a free port, around an AsyncLLM or what stands for one."""

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
from threads import stacks

from jaxspec.server.app import make_app
from jaxspec.server.http.http_server import HttpServer
from jaxspec.server.options import ServerOptions


@dataclasses.dataclass
class Served:
    """A server that runs: where it is, and what it serves."""

    port: int
    llm: Any
    service: Any
    loop: asyncio.AbstractEventLoop
    server: HttpServer

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def client(self, **options) -> httpx.Client:
        return httpx.Client(**{"base_url": self.root, "timeout": 120} | options)

    def post(self, path: str, **body) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def get(self, path: str, **options) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def call(self, work: Coroutine) -> Any:
        """What `work` gives, in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def tasks(self) -> int:
        """Tasks in the event loop, but for this question's own."""

        async def count():
            return len(asyncio.all_tasks()) - 1

        return self.call(count())


@contextlib.contextmanager
def serving(make_llm: Callable[[], Any], **options: Any) -> Iterator[Served]:
    """A server with these `ServerOptions`; what `make_llm` makes is closed in the end."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    ready, found, failed = threading.Event(), list[Served](), list[BaseException]()

    async def live() -> None:
        llm = make_llm()
        if inspect.isawaitable(llm):
            llm = await llm
        try:
            settings = ServerOptions(**{"access_log": False, **options})
            app = make_app(llm, settings)
            server = HttpServer(app, settings)
            logging.getLogger("uvicorn.error").setLevel("WARNING")  # its stream ends with the test
            port, loop = listener.getsockname()[1], asyncio.get_running_loop()
            found.append(Served(port, llm, app.state.service, loop, server))
            await server.serve_at(listener, ready.set)
        finally:
            await llm.close()

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    ready.wait(300)
    try:
        if failed:
            raise failed[0]
        yield found[0]
    finally:
        if not failed:
            found[0].server.end()
        thread.join(300)  # at the end of a long session, collecting garbage takes tens of seconds
        listener.close()
    assert not thread.is_alive(), stacks()
    if failed:
        raise failed[0]
