"""Replica: one engine process, from its start to its end."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.api.async_calls import WorkerSpec
from jaxspec.api.processes.channel import Channel
from jaxspec.api.processes.engine_client import EngineClient, Submission
from jaxspec.engine.engine_thread import Delta

_LOG = logging.getLogger(__name__)
_PROGRAM = "jaxspec.api.processes.replica_process"
_ENDING = 10.0  # seconds for the process to exit by itself
_MOST_QUEUEING = 128  # requests sent to a replica that it has not yet queued


class Replica:
    """One engine process and the requests sent to it. Used in one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel):
        self.process, self.channel = process, channel
        self.client: EngineClient
        self.has_failed = False  # in a step, which ends the process
        self._hearing: asyncio.Task[None]
        self._queueing = asyncio.Semaphore(_MOST_QUEUEING)

    @staticmethod
    async def start(environment: Mapping[str, str]) -> "Replica":
        """Start a process, which waits for `load`."""
        own, other = socket.socketpair()
        with other:
            channel = await Channel.of(own)
            try:
                process = subprocess.Popen(
                    # -P: import nothing from the working directory.
                    [sys.executable, "-P", "-m", _PROGRAM, str(other.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    env=dict(environment),
                    start_new_session=True,  # so that Ctrl-C reaches only this process
                )
            except BaseException:
                channel.close()
                raise
        return Replica(process, channel)

    async def load(
        self,
        options: dict[str, Any],
        *,
        receive: Callable[[Sequence[Delta]], None],
        failed: Callable[[Submission, Exception], None],
        begun: Callable[[Submission], None],
        over: Callable[[Submission], None],
    ) -> WorkerSpec:
        """Load an `AsyncLLM` with `options`; the other arguments are as in `EngineClient`.

        Raises:
            RuntimeError: the process ended by itself.
            Exception: the error of the load.
        """
        loaded = asyncio.get_running_loop().create_future()
        self.client = EngineClient(
            self.channel, receive=receive, failed=failed, begun=begun, over=over
        )
        self.channel.handlers = {
            **self.channel.handlers,
            "ready": loaded.set_result,
            "start_failed": loaded.set_exception,
        }
        self.channel.notify("options", options)
        self._hearing = asyncio.create_task(self.channel.run())
        await asyncio.wait([loaded, self._hearing], return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            await self.end()
            raise RuntimeError(
                f"The process of a replica {self.reason} before it was ready. Its output says why."
            )
        return loaded.result()

    async def take_over(self, submission: Submission) -> None:
        """Send a request unless it is aborted before; raises as `EngineClient.take_over`."""
        async with self._queueing:
            if not submission.is_aborted:
                await self.client.take_over(self.client.new_number(), submission)

    async def gone(self) -> None:
        """Wait until the process has ended or closed the connection."""
        await asyncio.wait([self._hearing])
        if (error := self._hearing.exception()) is not None:
            _LOG.error("A message of a replica failed, so it is ended.", exc_info=error)

    def fail(self) -> None:
        """Note that a step failed, which ends the process, and kill it if it does not in time."""
        if not self.has_failed:
            self.has_failed = True
            asyncio.get_running_loop().call_later(_ENDING, self._kill)

    async def end(self) -> None:
        """End the process, by SIGKILL if it does not end in time."""
        self.channel.notify("end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING):
                await self._exited()
        await self.kill()

    async def kill(self) -> None:
        """Kill the process, unless it has exited, and wait for its exit."""
        self._kill()
        await self._exited()

    def _kill(self) -> None:
        self.process.kill()  # no effect after its exit
        self.channel.close()

    async def _exited(self) -> None:
        while self.process.poll() is None:
            await asyncio.sleep(0.01)

    @property
    def reason(self) -> str:
        """Why the process ends, in words."""
        if self.has_failed:
            return "failed in a step"
        status = self.process.poll()
        return "is gone" if status is None else f"ended with status {status}"
