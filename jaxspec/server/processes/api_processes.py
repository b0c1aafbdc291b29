"""ApiProcesses: starts the API processes, joins them to the engine, and ends them."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from jaxspec.async_errors import EngineDeadError
from jaxspec.async_llm import AsyncLLM
from jaxspec.server.figures import Figures
from jaxspec.server.http_server import set_up_log
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.brief import Brief
from jaxspec.server.processes.channel import Channel
from jaxspec.server.processes.desk import Desk
from jaxspec.server.request_ids import LOG
from jaxspec.server.snapshot import Snapshot, loop_lag, snapshot_of
from jaxspec.server.step_watch import StepWatch

_PROGRAM = "jaxspec.server.processes.api_process"
_ENDING = 10.0  # seconds that processes get to end by themselves
_ENDING_NOW = 1.0
_ANSWERING = 1.0  # seconds that a process gets to tell its figures


class ApiProcesses:
    """A `Front` of several processes that listen at one socket: who is free takes a connection."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, port: socket.socket):
        """As many as `options` say; `port` is bound, and closed here once they have it."""
        self._llm, self._options, self._port = llm, options, port
        self._steps = StepWatch(llm)
        self._created = int(time.time())
        self._desks = list[Desk]()
        self._processes = list[subprocess.Popen[bytes]]()
        self._is_ending = False

    async def serve(self, on_start: Callable[[], None]) -> bool:
        """Serve until `end`, or until a process is gone; False: one ended by itself."""
        set_up_log()
        running = list[asyncio.Task[None]]()
        try:
            for number in range(1, self._options.api_processes + 1):
                running.append(asyncio.create_task((await self._start(number)).run()))
            self._port.close()  # or clients could still connect when all of them have ended
            opened = asyncio.create_task(self._opened())
            await asyncio.wait([opened, *running], return_when=asyncio.FIRST_COMPLETED)
            if opened.done():
                on_start()
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
            is_whole = self._is_ending
            if not is_whole:
                await self._tell_why(running)
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
        if now:
            asyncio.get_running_loop().call_later(_ENDING_NOW, self._kill)

    async def _start(self, number: int) -> Desk:
        own, other = socket.socketpair()
        desk = Desk(self._llm, await Channel.of(own), self._snapshot, self._steps.last)
        self._desks.append(desk)
        with other:
            ends = other.fileno(), self._port.fileno()
            self._processes.append(
                subprocess.Popen(  # an event loop's own would fork, which JAX warns of
                    # -P: what lies in the working directory is not the server's.
                    [sys.executable, "-P", "-m", _PROGRAM, *map(str, ends)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=ends,
                    start_new_session=True,  # so that Ctrl-C comes to this process alone
                )
            )
        desk.channel.tell("brief", Brief(self._options, self._llm.elsewhere(number), self._created))
        return desk

    async def _opened(self) -> None:
        for desk in self._desks:
            await desk.ready.wait()

    async def _snapshot(self) -> Snapshot:
        async def figures_of(desk: Desk) -> tuple[Figures, float]:
            async with asyncio.timeout(_ANSWERING):
                return await desk.channel.ask("figures")

        ready = [desk for desk in self._desks if desk.ready.is_set()]
        answers = await asyncio.gather(*map(figures_of, ready), return_exceptions=True)
        found = [each for each in answers if not isinstance(each, BaseException)]
        lags = [await loop_lag(), *(lag for _, lag in found)]
        return snapshot_of(self._llm, Figures.total(each for each, _ in found), max(lags))

    def _tell(self, name: str, *args: object) -> None:
        for desk in self._desks:
            desk.channel.tell(name, *args)

    async def _tell_why(self, running: list[asyncio.Task[None]]) -> None:
        """Log what ended the server, if it was no signal."""
        for task in running:
            if task.done() and (error := task.exception()) is not None:
                LOG.error("A message of an API process failed, and so the server ends.")
                LOG.error("It was this one:", exc_info=error)
        await asyncio.sleep(0.1)  # until the system knows how they ended
        for number, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                LOG.error(
                    "API process %d of %d ended by itself with status %d, and so the server ends. "
                    "What it said stands above; start the server again.",
                    *(number, len(self._processes), process.returncode),
                )

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # unless it has ended

    async def _clear(self) -> None:
        """See that all processes are gone; one whose channel is closed ends by itself."""
        for desk in self._desks:
            desk.channel.hang_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING):
                while any(process.poll() is None for process in self._processes):
                    await asyncio.sleep(0.02)
        self._kill()
        for process in self._processes:
            process.wait()
