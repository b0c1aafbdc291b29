"""Lifetime of the server: load, warm up, open the port, serve, drain, exit."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.engine.errors import ReplicasDeadError
from jaxspec.server.app import make_app
from jaxspec.server.generation.service import tokenizer_of
from jaxspec.server.http.http_server import HttpServer
from jaxspec.server.http.request_ids import LOG
from jaxspec.server.metrics.throughput_log import logging_throughput
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.api_processes import ApiProcesses

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK = 0.5  # seconds between checks for a failure of the engine
_SWITCH_SECONDS = 0.0005
"""Thread switch interval while serving (Python's default is 5 ms).

The event loop decodes the text of a whole step at once. With the default, the engine's thread could
wait 5 ms for the GIL each time that it releases it within a step.
"""


class _ThisProcess:
    """HTTP front end in the engine's process, with the interface of `ApiProcesses`."""

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
        pass  # `/health` reads the engine's own state

    def engine_ready(self, is_ready: bool) -> None:
        pass  # and so does `/ready`

    def end(self, *, now: bool = False) -> None:
        self._server.end(now=now)


async def serve(make_llm: Callable[[], AsyncLLM], options: ServerOptions) -> int:
    """Load a model, warm it up, open the port and serve until a signal.

    With `exit_on_failure`, a failed step ends it, too. The port opens last, so clients never
    connect to a server that is still loading.

    Returns:
        The exit status: 0; 1 if the engine failed or an API process exited by itself.

    Raises:
        OSError: the port can't be bound.
        ValueError: the file of keys can't be read, or the model has no tokenizer.
    """
    options.keys()  # fail before a model is loaded
    _allow_open_files()
    with _bound(options) as port, _switching():
        where = _address(port)
        async with make_llm() as llm:
            tokenizer_of(llm)  # fail before compilation
            if options.warm_up:
                await llm.get_ready()
            kind = _ThisProcess if options.api_processes == 1 else ApiProcesses
            front = kind(llm, options, port)
            shutdown = _Shutdown(llm, front, options)
            with shutdown.watching(), logging_throughput(llm, options, LOG.info):
                is_whole = await front.serve(lambda: LOG.info("Serving at %s", where))
            await shutdown.wait()
            return 0 if is_whole and llm.error is None else 1


class _Shutdown:
    """Ends a server.

    The first signal drains requests, a second one drops them. A failure of the engine ends the
    server if `exit_on_failure` is set.
    """

    def __init__(self, llm: AsyncLLM, front: _ThisProcess | ApiProcesses, options: ServerOptions):
        self._llm, self._front, self._options = llm, front, options
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle signals and failures of the engine within the context."""
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
        """Handle a signal: drain the first time, exit at once the second time."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
            return
        LOG.info("A second signal: running requests are aborted.")
        self._ending.cancel()
        self._front.end(now=True)

    async def wait(self) -> None:
        if self._ending is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._ending

    async def _watch(self) -> None:
        """Report changes to the front; exit after a failed step if `exit_on_failure` is set.

        A replica that ends repeatedly always ends the server, since all its work is lost.
        """
        was_ready = True
        while (error := self._llm.error) is None:
            await asyncio.sleep(_LOOK)
            if self._llm.is_ready != was_ready:
                was_ready = not was_ready
                self._front.engine_ready(was_ready)
        self._front.engine_failed(error)
        if self._options.exit_on_failure or isinstance(error, ReplicasDeadError):
            LOG.error("The engine failed: %s The process ends with status 1.", error)
            self._front.end()

    async def _end(self) -> None:
        seconds = self._options.shutdown_timeout
        LOG.info("Ending: new requests get 503, and running requests have %g seconds.", seconds)
        self._front.drain()
        try:
            if not await self._llm.drain(seconds):
                LOG.warning("Some requests were aborted after %g seconds.", seconds)
        finally:
            self._front.end()


@contextlib.contextmanager
def _switching() -> Iterator[None]:
    """Set the thread switch interval to `_SWITCH_SECONDS` within the context."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _bound(options: ServerOptions) -> Iterator[socket.socket]:
    """Bind the port without listening, so that a port in use fails before a model is loaded.

    Raises:
        OSError: the port can't be bound.
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


def _allow_open_files() -> None:
    """Raise this process's limit on open files, so on connections, to what the system allows."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _address(port: socket.socket) -> str:
    host, number, *_ = port.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{number}"
