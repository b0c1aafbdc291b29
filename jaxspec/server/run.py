"""Run: the server's life, from loading over the open port to the last stream's end."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from jaxspec.async_llm import AsyncLLM
from jaxspec.server.app import make_app
from jaxspec.server.options import ServerOptions
from jaxspec.server.request_ids import LOG
from jaxspec.server.service import Service

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK = 0.5  # seconds between looks for a failure of the engine
_CLOSING = 5  # seconds that connections get to send their last bytes
_SWITCH_SECONDS = 0.0005
"""For which a thread may keep Python's lock while another one waits for it.

The event loop makes texts of a whole step at once. With Python's own 5 ms the engine's thread would
wait for that at each of the places of a step where it lets go of the lock.
"""


class _Uvicorn(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port, and say so."""
        await super().startup(sockets)
        for each in sockets or ():
            host, port, *_ = each.getsockname()
            LOG.info("Serving at http://%s:%d", f"[{host}]" if ":" in host else host, port)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_Life`, which lets running requests end first."""
        yield


async def serve(make_llm: Callable[[], AsyncLLM], options: ServerOptions) -> int:
    """Load a model, warm it up, open the port and serve until a signal ends it.

    With `exit_on_failure` a step that fails ends it, too.

    The port opens last, so who can connect will be served.

    Returns:
        The exit status: 0; 1 if the engine failed, or the port can't be had.
    """
    options.keys()  # what is wrong there is told before a model is loaded
    with _bound(options) as listener, _switching():
        async with make_llm() as llm:
            if options.warm_up:
                await llm.warm_up()
            app = make_app(llm, options)
            server = _Uvicorn(
                uvicorn.Config(
                    app,
                    log_level="info",
                    access_log=options.access_log,
                    timeout_graceful_shutdown=_CLOSING,
                    ws="none",
                )
            )
            life = _Life(app.state.service, server)
            with life.heard():
                await server.serve([listener])
            await life.wait()
            return 0 if llm.error is None else 1


class _Life:
    """What ends a server: a signal lets requests end, a second one does not; a failure may."""

    def __init__(self, service: Service, server: uvicorn.Server):
        self._service, self._server = service, server
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hear signals inside, and of a failure if the options say so."""
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
        self._server.force_exit = self._server.should_exit = True

    async def wait(self) -> None:
        """Until the end that a signal began is over."""
        if self._ending is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._ending

    async def _watch(self) -> None:
        """Once a step has failed, let streams tell that to their ends, and end."""
        while self._service.options.exit_on_failure:
            if self._service.llm.error is not None:
                LOG.error("The engine failed: the process ends with status 1.")
                self._server.should_exit = True
                return
            await asyncio.sleep(_LOOK)

    async def _end(self) -> None:
        seconds = self._service.options.shutdown_timeout
        LOG.info("Ending: new requests get 503, and those that run have %g seconds.", seconds)
        self._service.is_draining = True
        try:
            if not await self._service.llm.drain(seconds):
                LOG.warning("Some requests were given up after %g seconds.", seconds)
        finally:
            self._server.should_exit = True


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
    """The port, taken but not open: a second server fails before it loads a model.

    Raises:
        OSError: it can't be had.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
        except OSError as error:
            raise OSError(
                f"The server can't listen at {options.host}:{options.port}: {error.strerror}. "
                "Choose another --port or --host, or end what listens there."
            ) from error
        yield listener
