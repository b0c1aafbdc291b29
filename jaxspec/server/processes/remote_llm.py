"""RemoteLLM: proxy of the engine for the routes of an API process."""

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Sequence
from typing import Any

from jaxspec.api.async_calls import AsyncCalls, EngineCall, Prepare
from jaxspec.api.async_llm import WorkerSpec
from jaxspec.engine.async_stream import AsyncStream, OutputQueue
from jaxspec.engine.errors import EngineDeadError, EngineGoneError, ServiceError
from jaxspec.engine.sample_stream import SampleStream, TokenDelta
from jaxspec.requests.outputs import Sample
from jaxspec.server.metrics.snapshot import Snapshot
from jaxspec.server.processes.channel import Channel
from jaxspec.viz.timeline import StepRow


class _RemoteOutputQueue(OutputQueue):
    """An `OutputQueue` whose request has a number that identifies it in both processes."""

    def __init__(self, number: int, samples: Sequence[Sample], channel: Channel):
        def settle(sample_stream: SampleStream, num_tokens: int | None) -> None:
            channel.notify("settle", number, sample_stream.index, num_tokens)

        super().__init__(asyncio.get_running_loop(), samples, _sample_stream_of, settle)
        self.number = number


def _sample_stream_of(sample: Sample) -> SampleStream:
    """Return a stream without a receiver; the engine's process has the one that is read."""
    return SampleStream(sample, lambda sample_stream, token_delta: None)


class RemoteLLM(AsyncCalls):
    """An engine in another process; tokenization and decoding to text run in this one.

    It has the interface of `AsyncLLM` that the routes use, and that of `Watch`.
    """

    def __init__(self, engine: WorkerSpec, channel: Channel):
        """Use the engine at the other end of `channel`; the caller runs `channel.run`."""
        super().__init__(engine.make_inputs(), engine.model_name, engine.shapes, engine.limits)
        self.error: ServiceError | None = None  # error of all further requests; None while serving
        self._channel, self._loop = channel, asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._output_queues = dict[int, _RemoteOutputQueue]()  # submitted requests, by number
        self._queueing = set[asyncio.Task[_RemoteOutputQueue]]()
        channel.handlers = {**channel.handlers, "deltas": self._receive, "failed": self._failed}

    @property
    def is_healthy(self) -> bool:
        """True until this process is informed of a failure."""
        return self.error is None

    async def snapshot(self) -> Snapshot:
        return await self._call("snapshot")

    async def last_steps(self, count: int) -> list[StepRow]:
        return await self._call("last_steps", count)

    async def _control(self, call: EngineCall) -> Any:
        return await self._call(call)

    def end(self, error: ServiceError) -> None:
        """Stop serving: every stream ends with `error`."""
        self.error = self.error or error
        output_queues, self._output_queues = self._output_queues, {}
        for output_queue in output_queues.values():
            output_queue.fail(copy.copy(error))

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

    def _drop(self, queueing: asyncio.Task[_RemoteOutputQueue]) -> None:
        if not queueing.cancelled() and queueing.exception() is None:
            output_queue = queueing.result()
            output_queue.close()
            self._end(output_queue)

    async def _queue(self, prepare: Prepare, *, is_long: bool) -> _RemoteOutputQueue:
        number = next(self._numbers)
        await self._call("expect", number)
        try:
            samples = await self._pool.run(prepare, is_long=is_long)
            output_queue = self._output_queues[number] = _RemoteOutputQueue(
                number, samples, self._channel
            )
            requests = [sample_stream.request for sample_stream in output_queue.sample_streams]
            for request in requests:
                request.tokens = []  # send the prompt once, as `request.prompt`
            await self._call("take_over", number, requests)
        except BaseException:
            self._output_queues.pop(number, None)
            self._channel.notify("abort", number)
            raise
        return output_queue

    async def _call(self, name: str, *args: Any) -> Any:
        if self.error is not None:
            raise copy.copy(self.error)  # a copy, which gets its own traceback
        try:
            return await self._channel.call(name, *args)
        except ConnectionError as error:
            raise EngineGoneError from error

    def _receive(self, token_deltas: list[tuple[int, int, TokenDelta]]) -> None:
        for number, index, token_delta in token_deltas:
            output_queue = self._output_queues.get(number)
            if output_queue is None:
                continue
            sample_stream = output_queue.sample_streams[index]
            output_queue.receive(sample_stream, token_delta)
            sample_stream.is_over = bool(
                token_delta.finish or sample_stream.reader.request.finish
            )  # the reader's finish is set by a stop string
            if sample_stream.is_over and all(each.is_over for each in output_queue.sample_streams):
                self._end(output_queue)

    def _failed(self, number: int, error: Exception) -> None:
        if isinstance(error, EngineDeadError):
            self.error = self.error or error
        if (output_queue := self._output_queues.pop(number, None)) is not None:
            output_queue.fail(copy.copy(error))

    def _end(self, output_queue: _RemoteOutputQueue) -> None:
        """Remove a request; abort it in the engine unless it was read to its end."""
        if self._output_queues.pop(output_queue.number, None) is not None:
            was_read = not (output_queue.is_closed or output_queue.error)
            self._channel.notify("release" if was_read else "abort", output_queue.number)

    def _abort(self, output_queue: OutputQueue) -> None:
        """Abort a request; may be called from any thread, such as by the garbage collector."""
        assert isinstance(output_queue, _RemoteOutputQueue)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, output_queue)
