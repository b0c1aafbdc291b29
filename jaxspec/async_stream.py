"""AsyncStream: what a request gets, read by a task of an event loop."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from jaxspec import arrivals
from jaxspec.arrivals import Arrival, Receiver, Tap
from jaxspec.logprobs import Logprob
from jaxspec.outputs import Sample, TextDelta
from jaxspec.process import check_process
from jaxspec.request import Finish, RequestMetrics
from jaxspec.sampling_params import RequestOutputKind


class Inbox(Receiver):
    """What came for a request and was not read yet; only the thread of its event loop touches it.

    Text is made where it is read, of all that came meanwhile at once. For stop strings it is made
    as tokens come, since a row that has met one should not go on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        samples: Sequence[Sample],
        make_tap: Callable[[Sample], Tap],
        settle: Callable[[Tap, int | None], None],
    ):
        """Begin a request of `samples`, which are not queued yet.

        `settle` is told of each sample with stop strings that was read to its end, and where a stop
        string ends it.
        """
        super().__init__(loop, [make_tap(sample) for sample in samples])
        self._settle = settle
        self.error: Exception | None = None  # why there is no more
        self.is_closed = False  # nobody reads any more; any thread may say so
        kind = samples[0].request.params.output_kind
        self._only_at_the_end = kind is RequestOutputKind.FINAL_ONLY
        self._due: dict[Sample, None] = {}  # those that have something for the reader, in order
        self._num_unread = len(samples)  # those whose end was not read yet
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing comes any more."""
        return self.is_closed or not self._num_unread

    def receive(self, tap: Tap, arrival: Arrival) -> None:
        """Take what a sample got; what comes behind a stop string is nothing."""
        sample = tap.reader
        if sample.request.finish or self.has_ended or self.error is not None:
            return
        self.stop_timer()
        try:
            arrivals.receive(sample.request, arrival)
            if tap.has_stops:
                self._look_for_stops(tap)
        except Exception as error:  # a tokenizer's: the streams of others go on
            self.fail(error)
            return
        if sample.request.finish or not self._only_at_the_end:
            self._due[sample] = None
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, behind what came before."""
        if self.error is None and not self.has_ended:
            self.error = error
            self.stop_timer()
            self._wake()

    def close(self) -> None:
        """Nobody reads any more."""
        self.is_closed = True
        self.stop_timer()
        self._due.clear()
        self._wake()

    def take(self) -> TextDelta | None:
        """What came for one of the samples, if something did."""
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

    def check_reader(self) -> None:
        """Refuse a reader who would wait in vain.

        Raises:
            RuntimeError: another task waits already, or this is another event loop.
        """
        if self._waiter is not None or asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(
                "A stream is read by one task at a time, in the event loop that submitted it. "
                "Submit one for each reader, or hand its pieces on."
            )

    async def change(self) -> None:
        """Wait until something came, or the stream has ended."""
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look_for_stops(self, tap: Tap) -> None:
        request, num_tokens = tap.reader.request, tap.reader.read()
        if num_tokens is not None:
            request.cut(num_tokens)
            request.finish = Finish.STOP
        if request.finish:
            self._settle(tap, num_tokens)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncStream(AsyncIterator[TextDelta]):
    """The pieces of a request as they come; pieces that came meanwhile are joined into one.

    The request ends with the stream: when its samples are whole, at `aclose`, behind an
    `async with` block, when the task that waits for a piece is cancelled, or when nothing refers to
    the stream any more. A variable that holds it keeps it alive behind an `async for` loop that was
    left early, so read it in an `async with` block.

    One task at a time reads it, in the event loop that submitted the request.

    Raises:
        EngineDeadError: a step failed; what came before is given first.
        QueueTimeoutError: no row was free within `queue_timeout`.
    """

    def __init__(
        self,
        inbox: Inbox,
        prompt: str | None,
        abort: Callable[[Inbox], None],
        keeps: object = None,
    ):
        """Read `inbox`; `abort` ends its request, and any thread may call it.

        `keeps`: what must live as long as the stream.
        """
        self._inbox, self._abort, self._keeps = inbox, abort, keeps
        self._process = os.getpid()
        self.prompt = prompt  # a chat as its template wrote it; None: it came as token ids
        self.request_id = inbox.request_id
        self.prompt_token_ids = list(inbox.taps[0].request.prompt)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found computed; known with the first delta."""
        return self._inbox.taps[0].reader.request.num_cached_tokens

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """As `RequestOutput.prompt_logprobs`; known with the first delta of any sample."""
        found = (tap.reader.prompt_logprobs() for tap in self._inbox.taps)
        return next((each for each in found if each is not None), None)

    @property
    def metrics(self) -> RequestMetrics | None:
        """Those of all samples together, as `RequestOutput.metrics`; None until all have ended."""
        requests = [tap.reader.request for tap in self._inbox.taps]
        if not all(request.finish for request in requests):
            return None
        return RequestMetrics.total([request.metrics for request in requests])

    def __aiter__(self) -> Self:
        """The stream itself."""
        return self

    async def __anext__(self) -> TextDelta:
        """Wait for the next piece."""
        check_process(self._process)
        self._inbox.check_reader()
        try:
            while (delta := self._inbox.take()) is None:
                if self._inbox.has_ended:
                    raise StopAsyncIteration
                if self._inbox.error is not None:
                    raise self._inbox.error
                await self._inbox.change()
        except (asyncio.CancelledError, Exception):
            self._leave()
            raise
        return delta

    async def __aenter__(self) -> Self:
        """The stream itself."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close it."""
        self._leave()

    async def aclose(self) -> None:
        """End the request if it runs; its row is free a step later."""
        self._leave()

    def _leave(self) -> None:
        if not self._inbox.has_ended:
            self._inbox.close()
            self._abort(self._inbox)

    def __del__(self) -> None:
        """End the request if it runs; the garbage collector may call in any thread."""
        if hasattr(self, "_inbox") and not self._inbox.has_ended:
            self._inbox.is_closed = True
            self._abort(self._inbox)
