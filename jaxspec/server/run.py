"""Run: the server's life, from loading over the open port to the last stream's end."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from jaxspec.async_llm import AsyncLLM
from jaxspec.server.app import make_app
from jaxspec.server.http_server import HttpServer
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.api_processes import ApiProcesses
from jaxspec.server.request_ids import LOG
from jaxspec.server.service import tokenizer_of

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK = 0.5  # seconds between looks for a failure of the engine
_SWITCH_SECONDS = 0.0005
"""For which a thread may keep Python's lock while another one waits for it.

The event loop makes texts of a whole step at once. With Python's own 5 ms the engine's thread would
wait for that at each of the places of a step where it lets go of the lock.
"""


class Front(Protocol):
    """What speaks HTTP: this process, or others."""

    async def serve(self, on_start: Callable[[], None]) -> bool:
        """Open the port, call `on_start`, and serve until `end`; False: it failed."""
        ...

    def drain(self) -> None:
        """Have `/ready` say that new requests are refused."""
        ...

    def engine_failed(self, error: BaseException) -> None:
        """A step failed."""
        ...

    def end(self, *, now: bool = False) -> None:
        """Answer what is being answered, or not even that, and return from `serve`."""
        ...


class _ThisProcess:
    """A `Front` whose routes ask the engine themselves."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, port: socket.socket):
        app = make_app(llm, options)
        self._service, self._port = app.state.service, port
        self._server = HttpServer(app, options)

    async def serve(self, on_start: Callable[[], None]) -> bool:
        await self._server.serve_at(self._port, on_start)
        return True

    def drain(self) -> None:
        self._service.is_draining = True

    def engine_failed(self, error: BaseException) -> None:
        pass  # `/health` asks the engine

    def end(self, *, now: bool = False) -> None:
        self._server.end(now=now)


async def serve(make_llm: Callable[[], AsyncLLM], options: ServerOptions) -> int:
    """Load a model, warm it up, open the port and serve until a signal ends it.

    With `exit_on_failure` a step that fails ends it, too.

    The port opens last, so who can connect will be served.

    Returns:
        The exit status: 0; 1 if the engine failed or an API process ended by itself.

    Raises:
        OSError: the port can't be had.
        ValueError: the file of keys can't be read, or the model has no tokenizer.
    """
    options.keys()  # what is wrong there is told before a model is loaded
    with _bound(options) as port, _switching():
        where = _address(port)
        async with make_llm() as llm:
            tokenizer_of(llm)  # told before all is compiled
            if options.warm_up:
                await llm.get_ready()
            front: Front
            if options.api_processes == 1:
                front = _ThisProcess(llm, options, port)
            else:
                front = ApiProcesses(llm, options, port)
            life = _Life(llm, front, options)
            with life.heard():
                is_whole = await front.serve(lambda: LOG.info("Serving at %s", where))
            await life.wait()
            return 0 if is_whole and llm.error is None else 1


class _Life:
    """What ends a server: a signal lets requests end, a second one does not; a failure may."""

    def __init__(self, llm: AsyncLLM, front: Front, options: ServerOptions):
        self._llm, self._front, self._options = llm, front, options
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hear signals inside, and of a failure."""
        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.add_signal_handler(each, self.end)
        watch = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            for each in _SIGNALS:
                loop.remove_signal_handler(each)

    def end(self) -> None:
        """A signal came."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
            return
        LOG.info("A second signal: requests that run are given up.")
        self._ending.cancel()
        self._front.end(now=True)

    async def wait(self) -> None:
        """Until the end that a signal began is over."""
        if self._ending is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._ending

    async def _watch(self) -> None:
        """Once a step has failed, let streams tell that to their ends, and end if asked to."""
        while (error := self._llm.error) is None:
            await asyncio.sleep(_LOOK)
        self._front.engine_failed(error)
        if self._options.exit_on_failure:
            LOG.error("The engine failed: the process ends with status 1.")
            self._front.end()

    async def _end(self) -> None:
        seconds = self._options.shutdown_timeout
        LOG.info("Ending: new requests get 503, and those that run have %g seconds.", seconds)
        self._front.drain()
        try:
            if not await self._llm.drain(seconds):
                LOG.warning("Some requests were given up after %g seconds.", seconds)
        finally:
            self._front.end()


@contextlib.contextmanager
def _switching() -> Iterator[None]:
    """Threads take turns as `_SWITCH_SECONDS` says."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _bound(options: ServerOptions) -> Iterator[socket.socket]:
    """The port, taken but not open: a server where one serves fails before it loads a model.

    Raises:
        OSError: it can't be had.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            port.bind((options.host, options.port))
        except OSError as error:
            raise OSError(
                f"The server can't listen at {options.host}:{options.port}: {error.strerror}. "
                "Choose another --port or --host, or end what listens there."
            ) from error
        yield port


def _address(port: socket.socket) -> str:
    host, number, *_ = port.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{number}"
