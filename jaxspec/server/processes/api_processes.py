"""ApiProcesses: starts the API processes, joins them to the engine, and ends them."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from jaxspec.async_errors import EngineDeadError
from jaxspec.async_llm import AsyncLLM
from jaxspec.server.figures import Figures
from jaxspec.server.http_server import set_up_log
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.channel import Channel
from jaxspec.server.processes.desk import Desk
from jaxspec.server.processes.remote_llm import Brief
from jaxspec.server.request_ids import LOG
from jaxspec.server.snapshot import Snapshot, snapshot_of
from jaxspec.server.step_watch import StepWatch

_PROGRAM = "jaxspec.server.processes.api_process"
_ENDING = 15.0  # seconds that a process gets to end by itself


class ApiProcesses:
    """A `Front` of several processes that share a port: each new connection goes to one."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, ports: Sequence[socket.socket]):
        """One process for each of `ports`, which are sockets bound to one port."""
        self._llm, self._options, self._ports = llm, options, ports
        self._steps = StepWatch(llm)
        self._desks = list[Desk]()
        self._processes = list[subprocess.Popen[bytes]]()
        self._is_ending = False

    async def serve(self, on_start: Callable[[], None]) -> bool:
        """Serve until `end`, or until a process is gone; False: one ended by itself."""
        set_up_log()
        try:
            running = [
                asyncio.create_task((await self._start(number, port)).run())
                for number, port in enumerate(self._ports, 1)
            ]
            opened = asyncio.gather(*(desk.ready.wait() for desk in self._desks))
            await asyncio.wait([opened, *running], return_when=asyncio.FIRST_COMPLETED)
            if opened.done():
                on_start()
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
            if not self._is_ending:
                LOG.error("An API process ended by itself, and so the server ends.")
            is_whole = self._is_ending
            self.end()
            await asyncio.wait(running, timeout=_ENDING)
            return is_whole
        finally:
            await self._clear()

    def drain(self) -> None:
        """Have `/ready` say that new requests are refused."""
        self._tell("drain")

    def engine_failed(self, error: BaseException) -> None:
        """Have `/health` say so."""
        self._tell("engine_failed", EngineDeadError(error))

    def end(self, *, now: bool = False) -> None:
        """End the processes: what is being answered is answered, unless it is `now`."""
        self._is_ending = True
        self._tell("end", now)

    async def _start(self, number: int, port: socket.socket) -> Desk:
        own, other = socket.socketpair()
        with other:
            self._processes.append(
                subprocess.Popen(  # an event loop's own would fork, which JAX warns of
                    [sys.executable, "-m", _PROGRAM, str(other.fileno()), str(port.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(other.fileno(), port.fileno()),
                    env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the device is the engine's alone
                    start_new_session=True,  # so that Ctrl-C comes to this process alone
                )
            )
        brief = Brief(self._options, self._llm.elsewhere(number))
        desk = Desk(self._llm, await Channel.of(own), brief, self._snapshot, self._steps.last)
        self._desks.append(desk)
        return desk

    async def _snapshot(self) -> Snapshot:
        parts = list[Figures]()
        for desk in self._desks:
            with contextlib.suppress(ConnectionError):
                parts.append(await desk.channel.ask("figures"))
        return snapshot_of(self._llm, Figures.total(parts))

    def _tell(self, name: str, *args: object) -> None:
        for desk in self._desks:
            desk.channel.tell(name, *args)

    async def _clear(self) -> None:
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _ENDING)
            process.kill()  # unless it has ended
            process.wait()
