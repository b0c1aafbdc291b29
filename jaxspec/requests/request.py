"""Host state of a request: prompt, parameters, tokens, finish reason, metrics and scheduling."""

import dataclasses
import enum
import itertools
import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from jaxspec.requests.logits_processors import ProcessorArgs
from jaxspec.requests.sampling_features import BIAS, SamplingFeatures
from jaxspec.requests.sampling_params import SamplingParams

INT32_MAX = 2**31 - 1
ROW_STOP_IDS = 16
"""Stop ids stored in a row; further ones are stored in the sampling tables of its slot."""
Experts = Integer[np.ndarray, "tokens layers top_k"]


class Finish(enum.IntEnum):
    """Finish reason of a row; the device writes these numbers."""

    RUNNING = 0
    STOP = 1  # a stop token id, or a stop string found on the host
    LENGTH = 2  # max_tokens or max_model_len
    ERROR = 3  # NaN logits, or every token is forbidden
    ABORT = 4  # ended by the caller; never written by the device

    @property
    def reason(self) -> str | None:
        """Public name: "stop", "length", "error", "abort", or None while running."""
        return self.name.lower() if self else None


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedTokens:
    """Copies of a request's pages, `[pages, page_size, layers, top_k]`, that may be in flight.

    Attributes:
        copies: The copies, in order.
        num_skipped: Tokens in the pages before the first copied one.
    """

    copies: Sequence[Any]
    num_skipped: int = 0

    @property
    def is_ready(self) -> bool:
        """True if `between` would not wait."""
        return all(isinstance(copy, np.ndarray) or copy.is_ready() for copy in self.copies)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies on the host."""
        return sum(copy.nbytes for copy in self.copies)

    def between(self, start: int, end: int) -> Experts:
        """Return the experts of the tokens from index `start` to `end`; wait for the copies."""
        parts = [np.asarray(copy) for copy in self.copies]
        tokens = [part.reshape(part.shape[0] * part.shape[1], *part.shape[2:]) for part in parts]
        first, last = start - self.num_skipped, max(0, end - self.num_skipped)
        return np.concatenate(tokens)[first:last]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle NumPy arrays; another process may have no device."""
        return RoutedTokens, ([np.asarray(copy) for copy in self.copies], self.num_skipped)


@dataclasses.dataclass
class AcceptanceCounts:
    """Numbers of verify steps with a draft at each position, and of those that accepted it.

    A verify step with 3 drafts of which 1 is accepted adds [1, 1, 1] and [1, 0, 0].
    """

    drafted_per_position: list[int] = dataclasses.field(default_factory=list)
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)

    def record(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add the numbers of drafted and accepted tokens at each position."""
        # New lists, so that shallow copies of these counts stay unchanged.
        self.drafted_per_position = _added(self.drafted_per_position, drafted)
        self.accepted_per_position = _added(self.accepted_per_position, accepted)

    @property
    def num_drafts(self) -> int:
        """Number of verify steps with drafts."""
        return self.drafted_per_position[0] if self.drafted_per_position else 0

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafted tokens."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted drafts."""
        return sum(self.accepted_per_position)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per verify step with drafts: 1 + accepted drafts / verify steps."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


def _added(counts: Sequence[int], more: Sequence[int]) -> list[int]:
    """Add two lists by position; the shorter one is padded with zeros."""
    if len(counts) == len(more):  # fast path: runs for each request in each step
        return list(map(operator.add, counts, more))
    return [sum(pair) for pair in itertools.zip_longest(counts, more, fillvalue=0)]


@dataclasses.dataclass
class RequestMetrics(AcceptanceCounts):
    """Acceptance counts and times of a request.

    Times are in seconds of `time.monotonic`, those with `wall_time` in their name of `time.time`.

    Attributes:
        arrival_time: Time at which the request was created.
        scheduled_time: Time at which it first got a row; a preemption does not change it.
        first_token_time: Time of its first output token.
        last_token_time: Time of its newest output token.
        num_tokens: Number of output tokens.
        arrival_wall_time: `arrival_time` on the wall clock.
    """

    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_tokens: int = 0
    arrival_wall_time: float = dataclasses.field(default_factory=time.time)

    def record_row(self, now: float) -> None:
        """Set `scheduled_time` to `now` if the request had no row before."""
        if self.scheduled_time is None:
            self.scheduled_time = now

    def record_tokens(self, count: int, now: float) -> None:
        """Count `count` output tokens emitted at the time `now`."""
        if count:
            self.first_token_time = self.first_token_time or now
            self.last_token_time = now
            self.num_tokens += count

    @staticmethod
    def total(parts: "Sequence[RequestMetrics]") -> "RequestMetrics":
        """Return the sums of all counts, the earliest first times and the latest last time."""
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
        """Time of the first token, in seconds of `time.time`."""
        return None if self.ttft is None else self.arrival_wall_time + self.ttft

    @property
    def last_token_wall_time(self) -> float | None:
        """Time of the last token, in seconds of `time.time`."""
        last = self.last_token_time
        return None if last is None else self.arrival_wall_time + last - self.arrival_time

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per step, with drafts or without."""
        steps = self.num_tokens - self.num_accepted_tokens  # each step also emits a target token
        return self.num_tokens / steps if steps > 0 else 1.0

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for fewer than two tokens."""
        if self.first_token_time is None or self.last_token_time is None or self.num_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_tokens - 1)


class PageTable(list[int]):
    """Pages of a request, in order, of which the device's page table may lack the newest."""

    def __init__(self, pages: Iterable[int] = (), *, is_sent: bool = False):
        """Start with `pages`; `is_sent`: a plan that copies pages sends all of them."""
        super().__init__(pages)
        self._num_sent = len(self) if is_sent else 0

    @property
    def is_unsent(self) -> bool:
        """True if the device's page table lacks any entry."""
        return len(self) > self._num_sent

    def unsent(self) -> list[tuple[int, int]]:
        """Return index and page of each entry that the device's page table lacks."""
        return list(enumerate(self))[self._num_sent :]

    def mark_sent(self) -> None:
        """Record that a plan sends all entries."""
        self._num_sent = len(self)


@dataclasses.dataclass(eq=False)
class Request:
    """One sample of a prompt.

    The scheduler has the authoritative `Request`. Readers in other threads or processes have a
    copy, updated by `TokenDelta`s; a stop string found by a reader is applied by `Scheduler.cut`.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int  # 32 bits; the noise of this sample is keyed by (seed, position)
    stop_ids: tuple[int, ...] = ()  # stop_token_ids and, unless ignored, the model's EOS ids
    proposer_key: int = 0  # index of its entry in the drafter tables
    parent: "Request | None" = None  # the sample whose prefill this one may share
    bad_words: tuple[tuple[int, ...], ...] = ()  # forbidden sequences of token ids
    request_id: str = ""  # shared by all samples of the prompt
    index: int = 0  # position among the samples of the prompt
    own_eos: tuple[int, ...] = ()  # the model's EOS ids in `stop_ids`
    room: int = INT32_MAX  # most tokens of any request of the engine, prompt included
    priority: int = 0  # lower values enter the batch first
    cache_salt: str | None = None  # only requests with equal salts share cached prefixes
    cache_boundaries: tuple[int, ...] = ()  # prefix lengths at which later prompts will diverge
    is_prefill_only: bool = False  # another engine computes the last prompt token and decodes
    returns_routes: bool = False  # the experts of its tokens are returned (`routes`)
    processor_args: ProcessorArgs | None = None  # None if it uses no logits processor
    grammar: Any = None  # the `grammar.Grammar` of its output; None if any token may follow
    # In the engine's process, one of the first two for a request with a grammar:
    matcher: Any = None  # a `grammar.Matcher`, which masks on the host
    automaton: Any = None  # a `grammar.Automaton`, which the device follows
    token_filter: Any = None  # a `grammar.TokenFilter` of logits processors on the host
    tokens: list[int] = dataclasses.field(init=False)  # prompt, then output
    # One per output token; a stop string or an interrupt may leave more. Logprobs, if requested,
    # are rows of `logprobs.LAYOUT`.
    draft_positions: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Any] = dataclasses.field(default_factory=list)  # None until computed
    # Versions of the weights that made the output, and the index of the first token of each.
    weight_starts: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    routes: RoutedTokens | None = None  # experts of its tokens, since it left its row
    num_cached_tokens: int = 0  # number of prompt tokens in the cached prefix
    finish: Finish = Finish.RUNNING
    is_streamed: bool = False  # a caller reads the tokens while the request runs
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    max_len: int = dataclasses.field(init=False)  # length at which it ends, prompt included
    features: SamplingFeatures = dataclasses.field(init=False)  # the smallest set that suffices
    max_drafts: int = dataclasses.field(init=False)  # most drafts per verify step

    # Scheduling; meaningful while the request is in the batch.
    generation: int = 0  # incremented on each entry into the batch, to match late results
    row: int = -1  # row in the last plan; -1 if the device has no row for it
    slot: int = 0
    pages: PageTable = dataclasses.field(default_factory=PageTable)
    prefill_len: int = 0  # tokens at entry: the prompt, after a preemption also the output
    num_computed: int = 0  # number of these dispatched; exact, because prefill has no drafts
    in_flight: int = 0  # uncollected steps that emit for it: at least 1 token each, until it ends
    in_flight_bound: int = 0  # most tokens that these steps can emit
    next_drafts: tuple[int, ...] = ()  # drafts to verify next; recorded if the host masks it
    grammar_state: int = 0  # its automaton's state on the device at entry; 0 without an automaton

    def __post_init__(self) -> None:
        """Start from the prompt, and compute once what each step reads."""
        self.tokens = list(self.prompt)
        asked = self.params.max_tokens
        wanted = self.room if asked is None else len(self.prompt) + asked
        self.max_len = min(wanted, self.room)
        self.features = self.params.features
        if len(self.stop_ids) > ROW_STOP_IDS or self.processor_args is not None:
            self.features |= SamplingFeatures.of(BIAS)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt)
        most = self.params.num_speculative_tokens
        self.max_drafts = INT32_MAX if most is None else min(most, INT32_MAX)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without what another process creates again."""
        return self.__dict__ | {"matcher": None, "automaton": None, "token_filter": None}

    @property
    def first_route(self) -> int:
        """Index of the first token whose experts are returned."""
        return min(self.params.routed_experts_prompt_start, len(self.prompt))

    @property
    def has_tables(self) -> bool:
        """True if its biases, stop ids or arguments are in the sampling tables of its slot."""
        return BIAS in self.features

    @property
    def awaits_result(self) -> bool:
        """True if its next token needs the results in flight: masks depend on all tokens."""
        return self.in_flight > 0 and self.is_masked_by_host

    @property
    def is_masked_by_host(self) -> bool:
        """True if the host computes the ids that may follow, at each position of a verify."""
        return self.matcher is not None or self.token_filter is not None

    def made_by(self, version: str) -> None:
        """Record that weights of this version make the tokens from the next one on."""
        if not self.weight_starts or self.weight_starts[-1][0] != version:
            self.weight_starts.append((version, self.num_output))

    def cut(self, num_tokens: int) -> None:
        """Remove all output after the first `num_tokens` output tokens."""
        del self.tokens[len(self.prompt) + num_tokens :]
        self.metrics.num_tokens = num_tokens

    @property
    def output(self) -> list[int]:
        """Output tokens emitted so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """Number of output tokens emitted so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def is_prefilling(self) -> bool:
        """True if not all of its `prefill_len` tokens are dispatched."""
        return self.num_computed < self.prefill_len

    @property
    def takes_decode_row(self) -> bool:
        """True if the next step may have a decode row for it: at one token per step it runs on.

        One that awaits a result is in a step in halves only.
        A last prompt token after a computed context is a decode row without drafts: the same
        kernel serves a forked sample (prompt 11, computed 10) and the tail of a chunked prompt.
        """
        if self.is_prefilling:
            return 0 < self.num_computed == self.prefill_len - 1 and not self.is_prefill_only
        return len(self.tokens) + self.in_flight < self.max_len

    @property
    def tokens_bound(self) -> int:
        """Most tokens it can have after the steps in flight, with every draft accepted."""
        return min(len(self.tokens) + self.in_flight_bound, self.max_len)

    @property
    def is_likely_over(self) -> bool:
        """True if the steps in flight end it at its mean number of tokens per step so far."""
        expected = len(self.tokens) + self.in_flight * self.metrics.tokens_per_step
        return not self.is_prefilling and expected >= self.max_len
