"""One request's life on the host: prompt, sampling choice, tokens so far, why it finished."""

import dataclasses
import enum
import itertools
import numbers
import time
from collections.abc import Sequence

from jaxspec.config import Variant


class Finish(enum.IntEnum):
    """Why a row ended; the numbers are what the device writes."""

    RUNNING = 0
    STOP = 1  # a stop token id, or a stop string found on the host
    LENGTH = 2  # max_tokens or max_model_len
    ERROR = 3  # the model gave NaN
    ABORT = 4  # the caller went away; never written by the device

    @property
    def reason(self) -> str | None:
        """The word users see: "stop", "length", "error", "abort", or None while running."""
        return self.name.lower() if self else None


MAX_TEMPERATURE = 1e6  # beyond it float32 scores could overflow


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop, in the words of vLLM.

    `temperature` 0 is greedy. `top_k` -1 or 0 and `top_p` 1 are off. `stop` strings end the text
    before them; `stop_token_ids` are kept as the last token. `min_tokens` forbids stop ids before
    so many tokens. `n` samples, each with noise of its own, share one prefill as
    far as rows are free when it ends.

    Raises:
        ValueError: a value outside its range; the message names the rule.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        for name, value in (("stop", stops), ("stop_token_ids", self.stop_token_ids or ())):
            if not isinstance(value, list | tuple):
                raise ValueError(f"{name} must be a list, got {value!r}.")
            object.__setattr__(self, name, tuple(value))
        self._check_integers()
        if not all(isinstance(value, numbers.Real) for value in (self.temperature, self.top_p)):
            raise ValueError(
                f"temperature and top_p must be numbers, got {self.temperature!r} and "
                f"{self.top_p!r}."
            )
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be a number from 0 to {MAX_TEMPERATURE:,.0f}, got "
                f"{self.temperature}; 0 is greedy."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 turns it off.")
        if any(not isinstance(token, numbers.Integral) for token in self.stop_token_ids):
            raise ValueError(
                f"stop_token_ids must be integers, got {list(self.stop_token_ids)}; texts go to "
                "stop."
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop strings must be non-empty strings, got {list(self.stop)}.")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > {self.max_tokens}."
            )

    def _check_integers(self) -> None:
        least = {"n": 1, "top_k": -1, "max_tokens": 1, "min_tokens": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, numbers.Integral)
                or value < minimum
            ):
                off = "; -1 turns it off" if name == "top_k" else ""
                raise ValueError(
                    f"{name} must be an integer of at least {minimum}, got {value!r}{off}."
                )
        seed = 0 if self.seed is None else self.seed
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must be an integer that fits in 64 bits, got {seed!r}.")

    @property
    def variant(self) -> Variant:
        """The least a program's sampling must be able to do for this request."""
        if self.temperature == 0:
            return "greedy"
        return "sampled" if self.top_k <= 0 and self.top_p == 1 else "full"


@dataclasses.dataclass
class RequestMetrics:
    """What speculation did for a request, and when its tokens came (seconds, `time.monotonic`)."""

    num_drafts: int = 0  # verify steps that had drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)
    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_tokens: int = 0

    def record(self, num_verifies: int, num_drafts: int, accepted: Sequence[int]) -> None:
        """Count verify steps of `num_drafts` drafts together.

        `accepted`: in how many of them the first draft stood, the first two, ...
        """
        self.num_drafts += num_verifies
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += sum(accepted)
        # A new list: copies of these metrics keep theirs.
        sums = itertools.zip_longest(self.accepted_per_position, accepted, fillvalue=0)
        self.accepted_per_position = [before + count for before, count in sums]

    @staticmethod
    def total(parts: "Sequence[RequestMetrics]") -> "RequestMetrics":
        """Counts of `parts` added up; times from the first arrival to the last token."""
        firsts = [p.first_token_time for p in parts if p.first_token_time is not None]
        lasts = [p.last_token_time for p in parts if p.last_token_time is not None]
        width = max(len(part.accepted_per_position) for part in parts)
        columns = [[0] * width]
        columns += [p.accepted_per_position + [0] * width for p in parts]
        return dataclasses.replace(
            parts[0],
            num_drafts=sum(part.num_drafts for part in parts),
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            arrival_time=min(part.arrival_time for part in parts),
            first_token_time=min(firsts, default=None),
            last_token_time=max(lasts, default=None),
            accepted_per_position=[sum(column) for column in zip(*columns, strict=False)],
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verify step gives on average: 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

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
    """One sample of one prompt. The scheduler alone changes it once it is queued."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int  # 32 bits; the noise of this sample is keyed by (seed, position)
    stop_ids: tuple[int, ...] = ()  # stop_token_ids and, unless ignored, the model's own
    proposer_key: int = 0  # which entry of the proposer's own tables is this request's
    leader: "Request | None" = None  # the sample whose prefill this one may share
    tokens: list[int] = dataclasses.field(default_factory=list)  # prompt, then what was emitted
    finish: Finish = Finish.RUNNING
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    max_len: int = dataclasses.field(init=False)  # tokens, prompt included, at which it ends
    variant: Variant = dataclasses.field(init=False)

    # Scheduling; meaningful while the request is in the batch.
    generation: int = 0  # one more each time it enters the batch: late results name theirs
    row: int = -1  # where the last plan put it; -1: the device has no row of it
    slot: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    num_pages_sent: int = 0  # of those, how many the device's page table holds
    prefill_len: int = 0  # tokens it entered with: the prompt, on resumption the output too
    num_computed: int = 0  # of those, how many are dispatched; exact, for prefill has no drafts
    in_flight: int = 0  # uncollected steps that emit for it: each gives a token, or it has ended
    in_flight_bound: int = 0  # the most those steps can give

    def __post_init__(self) -> None:
        """Start from the prompt. What each step asks for is worked out once."""
        self.tokens = list(self.prompt)
        self.max_len = len(self.prompt) + self.params.max_tokens
        self.variant = self.params.variant

    @property
    def output(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_prefilling(self) -> bool:
        """Whether some of the tokens it entered with are not dispatched yet."""
        return self.num_computed < self.prefill_len

    @property
    def tokens_bound(self) -> int:
        """Most tokens it can have when the steps in flight are done: every draft accepted."""
        return min(len(self.tokens) + self.in_flight_bound, self.max_len)

    @property
    def is_likely_over(self) -> bool:
        """Whether the steps in flight end it, should as many drafts stand as have so far."""
        expected = len(self.tokens) + self.in_flight * self.metrics.mean_acceptance_length
        return not self.is_prefilling and expected >= self.max_len
