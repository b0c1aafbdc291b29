"""One request's life on the host: prompt, sampling choice, tokens so far, why it finished."""

import dataclasses
import enum
import itertools
import operator
import time
from collections.abc import Sequence
from typing import Any

from jaxspec.sampler import BIAS, Sampler
from jaxspec.sampling_params import SamplingParams

INT32_MAX = 2**31 - 1
ROW_STOP_IDS = 16
"""Stop ids that a row has room for; where there are more, the rest is in its slot's tables."""


class Finish(enum.IntEnum):
    """Why a row ended; the numbers are what the device writes."""

    RUNNING = 0
    STOP = 1  # a stop token id, or a stop string found on the host
    LENGTH = 2  # max_tokens or max_model_len
    ERROR = 3  # the model gave NaN, or every token is forbidden
    ABORT = 4  # the caller went away; never written by the device

    @property
    def reason(self) -> str | None:
        """The word users see: "stop", "length", "error", "abort", or None while running."""
        return self.name.lower() if self else None


@dataclasses.dataclass
class DraftCounts:
    """In how many verifies there was a first draft, a second, ..., and in how many it stood."""

    drafted_per_position: list[int] = dataclasses.field(default_factory=list)
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)

    def record(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count verifies: how many drafted at each position, and in how many that draft stood."""
        # New lists: copies of these counts keep theirs.
        self.drafted_per_position = _added(self.drafted_per_position, drafted)
        self.accepted_per_position = _added(self.accepted_per_position, accepted)

    @property
    def num_drafts(self) -> int:
        """Verifies that had drafts."""
        return self.drafted_per_position[0] if self.drafted_per_position else 0

    @property
    def num_draft_tokens(self) -> int:
        """Drafts in all of them."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that stood."""
        return sum(self.accepted_per_position)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verify with drafts gives on average: 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


def _added(counts: Sequence[int], more: Sequence[int]) -> list[int]:
    """The sums by position; a position that one of them lacks counts 0 there."""
    if len(counts) == len(more):  # each step of each request adds
        return list(map(operator.add, counts, more))
    return [sum(pair) for pair in itertools.zip_longest(counts, more, fillvalue=0)]


@dataclasses.dataclass
class RequestMetrics(DraftCounts):
    """What speculation did for a request, and when its tokens came (seconds, `time.monotonic`).

    What has `wall_time` in its name is in seconds of `time.time`.
    `scheduled_time`: when it first had a row; a preemption does not change it.
    """

    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_tokens: int = 0
    arrival_wall_time: float = dataclasses.field(default_factory=time.time)

    def record_row(self, now: float) -> None:
        """Note that it has a row at the time `now`; the first one counts."""
        if self.scheduled_time is None:
            self.scheduled_time = now

    def record_tokens(self, count: int, now: float) -> None:
        """Count tokens that came at the time `now`."""
        if count:
            self.first_token_time = self.first_token_time or now
            self.last_token_time = now
            self.num_tokens += count

    @staticmethod
    def total(parts: "Sequence[RequestMetrics]") -> "RequestMetrics":
        """Counts of `parts` added up; times from the first arrival to the last token."""
        rows = [p.scheduled_time for p in parts if p.scheduled_time is not None]
        firsts = [p.first_token_time for p in parts if p.first_token_time is not None]
        lasts = [p.last_token_time for p in parts if p.last_token_time is not None]
        together = RequestMetrics(
            num_tokens=sum(part.num_tokens for part in parts),
            arrival_time=min(part.arrival_time for part in parts),
            arrival_wall_time=min(part.arrival_wall_time for part in parts),
            scheduled_time=min(rows, default=None),
            first_token_time=min(firsts, default=None),
            last_token_time=max(lasts, default=None),
        )
        for part in parts:
            together.record(part.drafted_per_position, part.accepted_per_position)
        return together

    @property
    def first_token_wall_time(self) -> float | None:
        """When the first token came, in seconds of `time.time`."""
        return None if self.ttft is None else self.arrival_wall_time + self.ttft

    @property
    def last_token_wall_time(self) -> float | None:
        """When the last token came, in seconds of `time.time`."""
        last = self.last_token_time
        return None if last is None else self.arrival_wall_time + last - self.arrival_time

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gave on average, with drafts or without."""
        steps = self.num_tokens - self.num_accepted_tokens  # each gave one besides
        return self.num_tokens / steps if steps > 0 else 1.0

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None below two tokens."""
        if self.first_token_time is None or self.last_token_time is None or self.num_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_tokens - 1)


@dataclasses.dataclass(eq=False)
class Request:
    """One sample of one prompt. The scheduler alone changes it once it is queued.

    So `tokens` and `finish` are the only record of what came and of why it ended.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int  # 32 bits; the noise of this sample is keyed by (seed, position)
    stop_ids: tuple[int, ...] = ()  # stop_token_ids and, unless ignored, the model's own
    proposer_key: int = 0  # which entry of the proposer's own tables is this request's
    leader: "Request | None" = None  # the sample whose prefill this one may share
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that may not follow each other
    request_id: str = ""  # what all samples of its prompt are called
    index: int = 0  # among them
    own_eos: tuple[int, ...] = ()  # those of `stop_ids` that are the model's own
    room: int = INT32_MAX  # tokens, prompt included, that any request of the engine may have
    priority: int = 0  # lower ones enter first
    cache_salt: str | None = None  # only requests with the same one share what is kept
    cache_boundaries: tuple[int, ...] = ()  # tokens behind which others will part from its prompt
    is_prefill_only: bool = False  # another engine computes its prompt's last token, and goes on
    tokens: list[int] = dataclasses.field(init=False)  # prompt, then what was emitted
    draft_positions: list[int] = dataclasses.field(default_factory=list)  # of each token emitted
    # Rows of `logprobs.LAYOUT`, if they are asked for: an interrupt may leave more than tokens.
    logprobs: list[Any] = dataclasses.field(default_factory=list)  # of each token emitted
    prompt_logprobs: list[Any] = dataclasses.field(default_factory=list)  # None: not known yet
    num_cached_tokens: int = 0  # of the prompt, which were not computed for it
    finish: Finish = Finish.RUNNING
    is_streamed: bool = False  # somebody reads its tokens as they come
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    max_len: int = dataclasses.field(init=False)  # tokens, prompt included, at which it ends
    sampler: Sampler = dataclasses.field(init=False)  # the least that serves it
    max_drafts: int = dataclasses.field(init=False)  # that a verify of it may have

    # Scheduling; meaningful while the request is in the batch.
    generation: int = 0  # one more each time it enters the batch: late results name theirs
    row: int = -1  # where the last plan put it; -1: the device has no row of it
    slot: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    num_pages_sent: int = 0  # how many of `pages` the device's page table holds
    prefill_len: int = 0  # tokens it entered with: the prompt, on resumption the output too
    num_computed: int = 0  # how many of these are dispatched; exact, for prefill has no drafts
    in_flight: int = 0  # uncollected steps that emit for it: each gives a token, or it has ended
    in_flight_bound: int = 0  # the most those steps can give

    def __post_init__(self) -> None:
        """Start from the prompt. What each step asks for is worked out once."""
        self.tokens = list(self.prompt)
        asked = self.params.max_tokens
        wanted = self.room if asked is None else len(self.prompt) + asked
        self.max_len = min(wanted, self.room)
        self.sampler = self.params.sampler
        if len(self.stop_ids) > ROW_STOP_IDS:
            self.sampler |= Sampler.of(BIAS)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt)
        most = self.params.num_speculative_tokens
        self.max_drafts = INT32_MAX if most is None else min(most, INT32_MAX)

    @property
    def has_tables(self) -> bool:
        """Whether what it forbids and favours is more than a row holds: its slot has tables."""
        return BIAS in self.sampler

    def cut(self, num_tokens: int) -> None:
        """Take away what was emitted behind so many tokens."""
        del self.tokens[len(self.prompt) + num_tokens :]
        del self.draft_positions[num_tokens:]
        self.metrics.num_tokens = num_tokens

    @property
    def output(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """How many tokens were emitted so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def is_prefilling(self) -> bool:
        """Whether some of the tokens it entered with are not dispatched yet."""
        return self.num_computed < self.prefill_len

    @property
    def takes_decode_row(self) -> bool:
        """Whether a row of the decode rectangle is due: at one token a step it is not over yet.

        One last prompt token over a context is a decode row without drafts: the same kernel then
        serves a forked sample (prompt 11, computed 10) and the tail of a chunked prompt.
        """
        if self.is_prefilling:
            return 0 < self.num_computed == self.prefill_len - 1 and not self.is_prefill_only
        return len(self.tokens) + self.in_flight < self.max_len

    @property
    def tokens_bound(self) -> int:
        """Most tokens it can have when the steps in flight are done: every draft accepted."""
        return min(len(self.tokens) + self.in_flight_bound, self.max_len)

    @property
    def is_likely_over(self) -> bool:
        """Whether the steps in flight end it, should as many drafts stand as have so far."""
        expected = len(self.tokens) + self.in_flight * self.metrics.tokens_per_step
        return not self.is_prefilling and expected >= self.max_len
