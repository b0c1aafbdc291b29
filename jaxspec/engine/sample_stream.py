"""Token deltas, passed from the engine thread to the thread that detokenizes them.

    engine thread    Request  --SampleStream.read-->  TokenDelta
    reader thread                                     TokenDelta  --receive-->  Request  -->  text

Each thread has a `Request` object for the sample. A `TokenDelta` is never modified, so neither
thread waits for the other, and the reader may run in another process.
"""

import abc
import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Finish, PageTable, Request, RequestMetrics, RoutedTokens
from jaxspec.requests.sampling_params import RequestOutputKind


class TokenDelta(NamedTuple):
    """New output tokens of a sample, and its state after them."""

    tokens: list[int]
    draft_positions: list[int]
    finish: Finish
    num_cached_tokens: int
    metrics: RequestMetrics | None = None  # set if this may be the last delta
    logprobs: Sequence[Any] = ()
    prompt_logprobs: list[Any] | None = None  # set in the first delta, if requested
    weight_starts: Sequence[tuple[str, int]] = ()  # `Request.weight_starts`, the whole list
    routes: RoutedTokens | None = None  # `Request.routes`, set in the last delta


class SampleStream(Sample):
    """Sample of the engine thread: passes on token deltas instead of making text.

    `request` is the scheduler's request. The request of `reader` is a copy that starts with the
    prompt and receives the deltas.
    """

    def __init__(
        self,
        reader: Sample,
        hand_on: Callable[["SampleStream", TokenDelta], None],
        stream_interval: int = 1,
    ):
        """Take over the request of `reader`, which is not queued yet.

        Args:
            reader: Sample that makes the text; it gets a copy of the request.
            hand_on: Called in the engine thread with each delta.
            stream_interval: Fewest tokens per delta, except for the first and the last delta.
                Ignored with stop strings, which are searched for after every step.
        """
        super().__init__(reader.request, None, None)
        self.reader, self._hand_on = reader, hand_on
        self.has_stops = bool(self.request.params.stop)
        params = self.request.params
        self.request.is_streamed = params.output_kind is not RequestOutputKind.FINAL_ONLY
        # The prompt logprobs are those of one sample, and another one may finish first.
        is_wanted_early = self.has_stops or params.prompt_logprobs is not None
        self._only_at_the_end = not (self.request.is_streamed or is_wanted_early)
        is_in_chunks = self.request.is_streamed and not self.has_stops
        self._interval = stream_interval if is_in_chunks else 1
        self.is_over = False  # the last delta was passed on, or is not needed
        self._num_given = 0
        reader.request = own = copy.copy(self.request)
        own.tokens, own.parent = list(own.prompt), None
        own.draft_positions, own.logprobs, own.pages = [], [], PageTable()
        own.weight_starts = []
        own.prompt_logprobs = [None] * len(own.prompt_logprobs)
        own.metrics = copy.copy(own.metrics)

    def read(self) -> None:
        """Pass on the new tokens if they reach the stream interval or the request has finished."""
        is_enough = not self._num_given or self._num_kept >= self._interval
        if self.request.finish or (is_enough and not self._only_at_the_end):
            self._give(self.request.finish)

    def release(self) -> None:
        """Pass on the tokens held back by the stream interval."""
        if self._interval > 1 and self._num_kept > 0:
            self._give(Finish.RUNNING)

    def end(self) -> None:
        """Pass on the last delta unless that was done; an unfinished request counts as aborted."""
        if not self.is_over:
            self._give(self.request.finish or Finish.ABORT)

    @property
    def is_settled(self) -> bool:
        """True without stop strings; otherwise the reader reports the end (`Session.settle`)."""
        return not self.has_stops

    @property
    def _num_kept(self) -> int:
        """Number of output tokens not passed on yet."""
        return self.request.num_output - self._num_given

    def _give(self, finish: Finish) -> None:
        request, first = self.request, self._num_given
        tokens = request.tokens[len(request.prompt) + first :]
        self._num_given = count = first + len(tokens)
        self.is_over = bool(finish)
        asked = request.params
        token_delta = TokenDelta(
            tokens,
            request.draft_positions[first:count],  # may exceed the tokens after an interrupt
            finish,
            request.num_cached_tokens,
            copy.copy(request.metrics) if finish or self.has_stops else None,
            () if asked.logprobs is None else request.logprobs[first:count],
            None if first or asked.prompt_logprobs is None else list(request.prompt_logprobs),
            tuple(request.weight_starts),
            request.routes if finish else None,
        )
        self._hand_on(self, token_delta)


def receive(request: Request, token_delta: TokenDelta) -> None:
    """Append a delta to the reader's request."""
    request.tokens += token_delta.tokens
    request.draft_positions += token_delta.draft_positions
    request.logprobs += token_delta.logprobs
    request.weight_starts = list(token_delta.weight_starts)
    request.num_cached_tokens, request.finish = token_delta.num_cached_tokens, token_delta.finish
    request.routes = token_delta.routes
    if token_delta.metrics is not None:
        request.metrics = token_delta.metrics
    if token_delta.prompt_logprobs is not None:
        request.prompt_logprobs = token_delta.prompt_logprobs


class Calls(Protocol):
    """An event loop, or a thread that waits for calls (`api.processes.replica_session.Mailbox`)."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object:
        """Call `callback` in the thread of the loop."""
        ...


class Receiver(abc.ABC):
    """Consumer of the deltas of a request, in the thread of its event loop."""

    def __init__(self, loop: Calls, sample_streams: Sequence[SampleStream]):
        self.loop, self.sample_streams = loop, sample_streams
        self.request_id = sample_streams[0].request_id
        self.timer: asyncio.TimerHandle | None = None  # aborts the request at its queue timeout

    @property
    def has_begun(self) -> bool:
        """True if the request has or had a row. Thread-safe."""
        return self.sample_streams[0].request.generation > 0  # the other samples enter later

    def begin(self) -> None:  # noqa: B027 (most receivers have nothing to do)
        """Called once in the engine thread, when the request has its first row."""

    @abc.abstractmethod
    def receive(self, sample_stream: SampleStream, token_delta: TokenDelta) -> None:
        """Process a delta of a sample."""

    @abc.abstractmethod
    def fail(self, error: Exception) -> None:
        """End the stream with an error."""

    def stop_timer(self) -> None:
        """Cancel the queue timeout."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
