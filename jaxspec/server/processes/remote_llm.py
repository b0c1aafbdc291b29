"""RemoteLLM: proxy of the engine for the routes of an API process."""

import asyncio
import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

from jaxspec.api.async_calls import AsyncCalls, EngineCall, Prepare, WorkerSpec
from jaxspec.api.processes.channel import Channel
from jaxspec.api.processes.engine_client import EngineClient, Submission
from jaxspec.engine.async_stream import AsyncStream, OutputQueue
from jaxspec.engine.engine_thread import receive_each
from jaxspec.engine.errors import EngineDeadError, EngineGoneError, ServiceError
from jaxspec.engine.sample_stream import Receiver
from jaxspec.server.metrics.snapshot import Snapshot
from jaxspec.viz.timeline import StepRow


class RemoteLLM(AsyncCalls):
    """An engine in another process; tokenization and decoding to text run in this one.

    It has the interface of `AsyncLLM` that the routes use, and that of `Watch`.
    """

    def __init__(self, engine: WorkerSpec, channel: Channel):
        """Use the engine at the other end of `channel`; the caller runs `channel.run`."""
        super().__init__(engine.make_inputs(), *engine[1:])
        self.error: ServiceError | None = None  # error of all further requests; None while serving
        self._has_replica = True
        self._channel, self._loop = channel, asyncio.get_running_loop()
        self._client = EngineClient(
            channel, receive=receive_each, failed=self._failed, over=self._forget
        )
        self._submissions = dict[Receiver, Submission]()  # queued requests
        self._queueing = set[asyncio.Task[OutputQueue]]()

    @property
    def is_healthy(self) -> bool:
        """True until this process is informed of a failure."""
        return self.error is None

    @property
    def is_ready(self) -> bool:
        """False while all replicas are being restarted, and after a failure."""
        return self.is_healthy and self._has_replica

    def note_ready(self, is_ready: bool) -> None:
        """Process the message that the engine takes requests, or none for now."""
        self._has_replica = is_ready

    async def snapshot(self) -> Snapshot:
        return await self._call("snapshot")

    async def last_steps(self, count: int) -> list[StepRow]:
        return await self._call("last_steps", count)

    async def _control(self, call: EngineCall) -> Any:
        return await self._call(call)

    def end(self, error: ServiceError) -> None:
        """Stop serving: every stream ends with `error`."""
        self.error = self.error or error
        self._submissions.clear()
        for submission in self._client.forget_all():
            submission.receiver.fail(copy.copy(error))

    async def _submit(self, prepare: Prepare, *, is_long: bool = False) -> AsyncStream:
        # Queueing continues if the caller is cancelled: only queued requests can be aborted.
        queueing = asyncio.ensure_future(self._queue(prepare, is_long=is_long))
        self._queueing.add(queueing)
        queueing.add_done_callback(self._queueing.discard)
        try:
            output_queue = await asyncio.shield(queueing)
        except asyncio.CancelledError:
            queueing.add_done_callback(self._drop)
            raise
        return AsyncStream(output_queue, self._abort, keeps=self)

    def _drop(self, queueing: asyncio.Task[OutputQueue]) -> None:
        if not queueing.cancelled() and queueing.exception() is None:
            output_queue = queueing.result()
            output_queue.close()
            self._end(output_queue)

    async def _queue(self, prepare: Prepare, *, is_long: bool) -> OutputQueue:
        number = self._client.new_number()
        await self._call("expect", number)
        try:
            samples = await self._pool.run(prepare, is_long=is_long)
        except BaseException:
            self._channel.notify("abort", number)
            raise
        submission = Submission(
            functools.partial(OutputQueue, self._loop, samples), self._client.settle
        )
        output_queue = submission.receiver
        assert isinstance(output_queue, OutputQueue)
        self._submissions[output_queue] = submission
        try:
            with self._refusing():
                await self._client.take_over(number, submission)
        except BaseException:
            self._submissions.pop(output_queue, None)
            raise
        return output_queue

    async def _call(self, name: str, *args: Any) -> Any:
        with self._refusing():
            return await self._channel.call(name, *args)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise `error` if it is set, and EngineGoneError if the channel is closed."""
        if self.error is not None:
            raise copy.copy(self.error)  # a copy, which gets its own traceback
        try:
            yield
        except ConnectionError as error:
            raise EngineGoneError from error

    def _failed(self, submission: Submission, error: Exception) -> None:
        if isinstance(error, EngineDeadError):
            self.error = self.error or error
        self._forget(submission)
        submission.receiver.fail(copy.copy(error))

    def _forget(self, submission: Submission) -> None:
        self._submissions.pop(submission.receiver, None)

    def _end(self, output_queue: Receiver) -> None:
        if (submission := self._submissions.get(output_queue)) is not None:
            self._client.abort(submission)

    def _abort(self, output_queue: Receiver) -> None:
        """Abort a request; may be called from any thread, such as by the garbage collector."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, output_queue)
