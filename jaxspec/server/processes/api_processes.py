"""ApiProcesses: starts the API processes, connects them to the engine and ends them."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.processes.channel import Channel
from jaxspec.api.processes.engine_server import RemoteEngineServer
from jaxspec.engine.errors import EngineDeadError
from jaxspec.server.http.http_server import set_up_log
from jaxspec.server.http.request_ids import LOG
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.metrics.snapshot import Snapshot, loop_lag, snapshot_of
from jaxspec.server.metrics.step_watch import StepWatch
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.api_process import WorkerConfig

_PROGRAM = "jaxspec.server.processes.api_process"
_ENDING = 10.0  # seconds for processes to exit by themselves
_ENDING_NOW = 1.0
_ANSWERING = 1.0  # seconds for a process to return its metrics


class ApiProcesses:
    """HTTP front end of several processes that accept connections from one shared socket."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, port: socket.socket):
        """`port` is a bound socket; this process closes it once all API processes have it."""
        self._llm, self._options, self._port = llm, options, port
        self._steps = StepWatch(llm)
        self._created = int(time.time())
        self._engine_servers = list[RemoteEngineServer]()
        self._ready = list[asyncio.Event]()  # of each process, set once it has opened the port
        self._processes = list[subprocess.Popen[bytes]]()
        self._is_ending = False

    async def serve(self, on_start: Callable[[], None]) -> bool:
        """Open the port, call `on_start` and serve until `end`.

        Returns:
            False if a process exited by itself, which ends the others.
        """
        set_up_log()
        running = list[asyncio.Task[None]]()
        try:
            for number in range(1, self._options.api_processes + 1):
                running.append(asyncio.create_task((await self._start(number)).run()))
            self._port.close()  # else clients could connect after all processes have exited
            opened = asyncio.create_task(self._opened())
            await asyncio.wait([opened, *running], return_when=asyncio.FIRST_COMPLETED)
            if opened.done():
                on_start()
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
            is_whole = self._is_ending
            if not is_whole:
                await self._log_failure(running)
                self.end()
            await asyncio.wait(running, timeout=_ENDING)
            return is_whole
        finally:
            await self._clear()

    def drain(self) -> None:
        """Make `/ready` return 503: new requests are refused."""
        self._notify("drain")

    def engine_failed(self, error: BaseException) -> None:
        """Make `/health` return 503."""
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(error)
        self._notify("engine_failed", dead)

    def engine_ready(self, is_ready: bool) -> None:
        """Make `/ready` return 200, or 503 while the engine takes no requests."""
        self._notify("engine_ready", is_ready)

    def end(self, *, now: bool = False) -> None:
        """Finish the requests in progress, or drop them if `now`, and return from `serve`."""
        self._is_ending = True
        self._notify("end", now)
        if now:
            asyncio.get_running_loop().call_later(_ENDING_NOW, self._kill)

    async def _start(self, number: int) -> RemoteEngineServer:
        own, other = socket.socketpair()
        ready = asyncio.Event()
        handlers = {
            "ready": ready.set,
            "snapshot": self._snapshot,
            "last_steps": self._steps.last,
        }
        engine_server = RemoteEngineServer(self._llm, await Channel.of(own), handlers)
        self._engine_servers.append(engine_server)
        self._ready.append(ready)
        with other:
            ends = other.fileno(), self._port.fileno()
            self._processes.append(
                subprocess.Popen(  # asyncio's subprocesses may fork, which JAX warns about
                    # -P: import nothing from the working directory.
                    [sys.executable, "-P", "-m", _PROGRAM, *map(str, ends)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=ends,
                    start_new_session=True,  # so that Ctrl-C reaches only this process
                )
            )
        engine_server.channel.notify(
            "config", WorkerConfig(self._options, self._llm.worker_spec(number), self._created)
        )
        return engine_server

    async def _opened(self) -> None:
        for ready in self._ready:
            await ready.wait()

    async def _snapshot(self) -> Snapshot:
        async def metrics_of(engine_server: RemoteEngineServer) -> tuple[ServerMetrics, float]:
            async with asyncio.timeout(_ANSWERING):
                return await engine_server.channel.call("metrics")

        both = zip(self._engine_servers, self._ready, strict=True)
        asked = [engine_server for engine_server, ready in both if ready.is_set()]
        answers = await asyncio.gather(*map(metrics_of, asked), return_exceptions=True)
        found = [each for each in answers if not isinstance(each, BaseException)]
        lags = [await loop_lag(), *(lag for _, lag in found)]
        requests = ServerMetrics.total(each for each, _ in found)
        return await snapshot_of(self._llm, requests, max(lags))

    def _notify(self, name: str, *args: object) -> None:
        for engine_server in self._engine_servers:
            engine_server.channel.notify(name, *args)

    async def _log_failure(self, running: list[asyncio.Task[None]]) -> None:
        """Log why the server ends without a signal."""
        for task in running:
            if task.done() and (error := task.exception()) is not None:
                LOG.error("A message of an API process failed, so the server ends.")
                LOG.error("The error:", exc_info=error)
        await asyncio.sleep(0.1)  # until exit statuses are available
        for number, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                LOG.error(
                    "API process %d of %d ended by itself with status %d, and so the server ends. "
                    "Its output is above; start the server again.",
                    *(number, len(self._processes), process.returncode),
                )

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # no effect after its exit

    async def _clear(self) -> None:
        """Close the channels, which ends the processes, and kill those that do not exit in time."""
        for engine_server in self._engine_servers:
            engine_server.channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING):
                while any(process.poll() is None for process in self._processes):
                    await asyncio.sleep(0.02)
        self._kill()
        for process in self._processes:
            process.wait()
