"""`AsyncStream`, which a task reads, and its output queue."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Self

from jaxspec.engine.sample_stream import Calls, Receiver, SampleStream, TokenDelta, receive
from jaxspec.process import check_process
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import RequestOutput, Sample, TextDelta
from jaxspec.requests.request import Finish, RequestMetrics
from jaxspec.requests.sampling_params import RequestOutputKind


class OutputBuffer(Receiver):
    """Unread deltas of a request. Used in the thread of its loop only.

    Tokens are detokenized when they are read, all pending ones at once. With stop strings they are
    detokenized on arrival, so that a row that completed one is ended early.
    """

    def __init__(
        self,
        loop: Calls,
        samples: Sequence[Sample],
        make_sample_stream: Callable[[Sample], SampleStream],
        settle: Callable[[SampleStream, int | None], None],
    ):
        """Create the buffer of `samples`, which are not submitted yet.

        `make_sample_stream` and `settle` are those of `EngineThread.submit`.
        """
        super().__init__(loop, [make_sample_stream(sample) for sample in samples])
        self._settle = settle
        self.error: Exception | None = None  # ends the stream
        self.is_closed = False  # no longer read; set from any thread
        kind = samples[0].request.params.output_kind
        self._only_at_the_end = kind is RequestOutputKind.FINAL_ONLY
        self._due: dict[Sample, None] = {}  # samples with unread output, in order
        self._unrouted = set[Sample]()  # ended by a stop string; the engine will send their routes
        self._num_unread = len(samples)  # samples not read to their end

    @property
    def has_ended(self) -> bool:
        """True if no delta is left to read."""
        return self.is_closed or not self._num_unread

    def receive(self, sample_stream: SampleStream, token_delta: TokenDelta) -> None:
        """Queue a delta; of deltas after a stop string only the routes are read."""
        sample = sample_stream.reader
        if self.has_ended or self.error is not None:
            return
        if sample in self._unrouted and token_delta.finish:
            self._unrouted.remove(sample)
            sample.request.routes = token_delta.routes
            self._due[sample] = None
            self._wake()
        if sample.request.finish:
            return
        self.stop_timer()
        try:
            receive(sample.request, token_delta)
            if sample_stream.has_stops:
                self._look_for_stops(sample_stream)
        except Exception as error:  # from the tokenizer; other streams continue
            self.fail(error)
            return
        if sample.request.finish and not token_delta.finish and sample.request.returns_routes:
            self._unrouted.add(sample)
            self._due.pop(sample, None)
        elif sample.request.finish or not self._only_at_the_end:
            self._due[sample] = None
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the unread deltas."""
        if self.error is None and not self.has_ended:
            self.error = error
            self.stop_timer()
            self._give_up_routes()
            self._wake()

    def close(self) -> None:
        """Discard unread deltas and end the stream."""
        self.is_closed = True
        self.stop_timer()
        self._due.clear()
        self._wake()

    def take(self) -> TextDelta | None:
        """Return the unread output of a sample as one delta, or None if there is none."""
        while self._due:
            sample = next(iter(self._due))
            del self._due[sample]
            if not sample.request.params.stop:
                sample.read()
            delta = sample.take()
            if delta is not None:
                self._num_unread -= sample.is_taken
                return delta
        return None

    def _give_up_routes(self) -> None:
        """Let samples that a stop string has ended be read without their routes."""
        self._due |= dict.fromkeys(self._unrouted)
        self._unrouted.clear()

    def _look_for_stops(self, sample_stream: SampleStream) -> None:
        request, num_tokens = sample_stream.reader.request, sample_stream.reader.read()
        if num_tokens is not None:
            request.cut(num_tokens)
            request.finish = Finish.STOP
        if request.finish:
            self._settle(sample_stream, num_tokens)

    def _wake(self) -> None:
        """Wake the reader: there is new output, or the stream has ended."""


class OutputQueue(OutputBuffer):
    """Unread deltas of a request that a task of an event loop waits for."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        samples: Sequence[Sample],
        make_sample_stream: Callable[[Sample], SampleStream],
        settle: Callable[[SampleStream, int | None], None],
    ):
        """Create the queue; the arguments are as in `OutputBuffer`."""
        super().__init__(loop, samples, make_sample_stream, settle)
        self._event_loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def check_reader(self) -> None:
        """Raise if the calling task may not wait for a delta.

        Raises:
            RuntimeError: another task waits already, or this is another event loop.
        """
        if self._waiter is not None or asyncio.get_running_loop() is not self._event_loop:
            raise RuntimeError(
                "A stream is read by one task at a time, in the event loop that submitted it. "
                "Submit one for each reader, or hand its pieces on."
            )

    async def change(self) -> None:
        """Wait for new output or the end of the stream."""
        self._waiter = self._event_loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncStream(AsyncIterator[TextDelta]):
    """Asynchronous iterator over the deltas of a request. Pending deltas are joined into one.

    The request ends with the stream: when all samples have finished, at `aclose`, at the end of an
    `async with` block, when the task that waits for a delta is cancelled, or when the stream is
    garbage-collected. A variable that refers to the stream keeps the request running after a
    `break` out of an `async for` loop, so iterate in an `async with` block.

    One task at a time reads it, in the event loop that submitted the request.

    Attributes:
        prompt: Text of the prompt, for a chat as rendered by its template; None for token ids.
        request_id: Id of the request.
        prompt_token_ids: Token ids of the prompt.

    Raises:
        EngineDeadError: a step failed; pending deltas are returned first.
        QueueTimeoutError: no row was free within `queue_timeout`.
    """

    def __init__(
        self,
        output_queue: OutputQueue,
        abort: Callable[[OutputQueue], None],
        keeps: object = None,
    ):
        """Read `output_queue`.

        Args:
            output_queue: Deltas of the request.
            abort: Aborts the request; thread-safe.
            keeps: Object to keep alive as long as the stream.
        """
        self._output_queue, self._abort, self._keeps = output_queue, abort, keeps
        self._process = os.getpid()
        self.request_id = output_queue.request_id
        first = output_queue.sample_streams[0]
        self.prompt = first.reader.prompt_text
        self.prompt_token_ids = list(first.request.prompt)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens in the cached prefix, set with the first delta."""
        return self._output_queue.sample_streams[0].reader.request.num_cached_tokens

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """`RequestOutput.prompt_logprobs`, set with the first delta of any sample."""
        found = (
            sample_stream.reader.prompt_logprobs()
            for sample_stream in self._output_queue.sample_streams
        )
        return next((each for each in found if each is not None), None)

    @property
    def metrics(self) -> RequestMetrics | None:
        """`RequestOutput.metrics` of all samples together; None until all have finished."""
        requests = [
            sample_stream.reader.request for sample_stream in self._output_queue.sample_streams
        ]
        if not all(request.finish for request in requests):
            return None
        return RequestMetrics.total([request.metrics for request in requests])

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Read the stream as `RequestOutput`s, whose contents `output_kind` selects.

        Yields:
            The output after all pending deltas.

        Raises:
            ServiceError, RuntimeError: as when the stream itself is read.
        """
        samples = [each.reader for each in self._output_queue.sample_streams]
        async for delta in self:
            deltas = [delta, *iter(self._output_queue.take, None)]
            if (output := RequestOutput.due(samples, deltas)) is not None:
                yield output

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        check_process(self._process)
        self._output_queue.check_reader()
        try:
            while (delta := self._output_queue.take()) is None:
                if self._output_queue.has_ended:
                    raise StopAsyncIteration
                if self._output_queue.error is not None:
                    raise self._output_queue.error
                await self._output_queue.change()
        except (asyncio.CancelledError, Exception):
            self._leave()
            raise
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    async def aclose(self) -> None:
        """Abort the request if it is unfinished; its row is freed within one step."""
        self._leave()

    def _leave(self) -> None:
        if not self._output_queue.has_ended:
            self._output_queue.close()
            self._abort(self._output_queue)

    def __del__(self) -> None:
        """Abort the request if it is unfinished; the garbage collector may call from any thread."""
        if hasattr(self, "_output_queue") and not self._output_queue.has_ended:
            self._output_queue.is_closed = True
            self._abort(self._output_queue)
