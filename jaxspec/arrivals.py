"""Arrivals: tokens on their way from the engine's thread to the thread that makes text of them.

    engine's thread    Request  --Tap.read-->  Arrival
    reader's thread                            Arrival  --receive-->  its own Request  -->  text

An arrival holds what nobody changes any more. So neither thread waits for the other, and the
reader might as well live in another process.
"""

import abc
import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxspec.outputs import Sample
from jaxspec.request import Finish, Request, RequestMetrics
from jaxspec.sampling_params import RequestOutputKind


class Arrival(NamedTuple):
    """What a sample got since the arrival before, and what is known of it now."""

    tokens: list[int]
    draft_positions: list[int]
    finish: Finish
    num_cached_tokens: int
    metrics: RequestMetrics | None = None  # as they are now, if this may be the end
    logprobs: Sequence[Any] = ()
    prompt_logprobs: list[Any] | None = None  # with the first one, if they were asked for


class Tap(Sample):
    """The engine's side of a sample: it hands on what came, and makes no text.

    `request` is the one that the scheduler has; that of `reader` is a copy, which starts with the
    prompt.
    """

    def __init__(
        self,
        reader: Sample,
        hand_on: Callable[["Tap", Arrival], None],
        stream_interval: int = 1,
    ):
        """Take over the request of `reader`, which is not queued yet.

        `hand_on` gets what came, in the thread that steps: the first token and the end at once, and
        between them at least `stream_interval` tokens at a time. Stop strings need each token as it
        comes, so a request that has some passes the interval over.
        """
        super().__init__(reader.request, None, None)
        self.reader, self._hand_on = reader, hand_on
        self.has_stops = bool(self.request.params.stop)
        params = self.request.params
        self.request.is_streamed = params.output_kind is not RequestOutputKind.FINAL_ONLY
        # All samples of a prompt tell its logprobs, and one may end before the one that has them.
        is_wanted_early = self.has_stops or params.prompt_logprobs is not None
        self._only_at_the_end = not (self.request.is_streamed or is_wanted_early)
        is_in_chunks = self.request.is_streamed and not self.has_stops
        self._interval = stream_interval if is_in_chunks else 1
        self.is_over = False  # the end was handed on, or nobody wants it
        self._num_given = 0
        reader.request = own = copy.copy(self.request)
        own.tokens, own.leader = list(own.prompt), None
        own.draft_positions, own.logprobs, own.pages = [], [], []
        own.prompt_logprobs = [None] * len(own.prompt_logprobs)
        own.metrics = copy.copy(own.metrics)

    def read(self) -> None:
        """Hand on what came, if it is enough; nothing before the end if nobody reads it."""
        is_enough = not self._num_given or self._num_kept >= self._interval
        if self.request.finish or (is_enough and not self._only_at_the_end):
            self._give(self.request.finish)

    def release(self) -> None:
        """Hand on what the interval keeps back of a request that no more will come of."""
        if self._interval > 1 and self._num_kept > 0:
            self._give(Finish.RUNNING)

    def end(self) -> None:
        """Hand the end on, if that was not done; a request that was never let in is aborted."""
        if not self.is_over:
            self._give(self.request.finish or Finish.ABORT)

    @property
    def is_settled(self) -> bool:
        """True without stop strings; with them only the reader, which makes the text, can tell."""
        return not self.has_stops

    @property
    def _num_kept(self) -> int:
        """Tokens that were not handed on."""
        return self.request.num_output - self._num_given

    def _give(self, finish: Finish) -> None:
        request, first = self.request, self._num_given
        tokens = request.tokens[len(request.prompt) + first :]
        self._num_given = count = first + len(tokens)
        self.is_over = bool(finish)
        asked = request.params
        arrival = Arrival(
            tokens,
            request.draft_positions[first:count],  # an interrupt leaves too many
            finish,
            request.num_cached_tokens,
            copy.copy(request.metrics) if finish or self.has_stops else None,
            () if asked.logprobs is None else request.logprobs[first:count],
            None if first or asked.prompt_logprobs is None else list(request.prompt_logprobs),
        )
        self._hand_on(self, arrival)


def receive(request: Request, arrival: Arrival) -> None:
    """Add an arrival to the reader's request."""
    request.tokens += arrival.tokens
    request.draft_positions += arrival.draft_positions
    request.logprobs += arrival.logprobs
    request.num_cached_tokens, request.finish = arrival.num_cached_tokens, arrival.finish
    if arrival.metrics is not None:
        request.metrics = arrival.metrics
    if arrival.prompt_logprobs is not None:
        request.prompt_logprobs = arrival.prompt_logprobs


class Receiver(abc.ABC):
    """Who takes what comes for a request; it lives in the thread of its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, taps: Sequence[Tap]):
        """Take what the request's samples get, by their `taps`."""
        self.loop, self.taps = loop, taps
        self.request_id = taps[0].request_id
        self.timer: asyncio.TimerHandle | None = None  # that gives it up, unless a row comes

    @property
    def has_begun(self) -> bool:
        """Whether it has a row, or had one; any thread may ask."""
        return self.taps[0].request.generation > 0  # the others come in behind the first

    @abc.abstractmethod
    def receive(self, tap: Tap, arrival: Arrival) -> None:
        """Take what a sample got."""

    @abc.abstractmethod
    def fail(self, error: Exception) -> None:
        """Nothing more comes, and why."""

    def stop_timer(self) -> None:
        """It is not given up any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
