"""How to choose tokens and when to stop, as the caller says it."""

import dataclasses
from typing import Any

import numpy as np

from jaxspec import logit_values
from jaxspec.checks import are_integers, boolean, integer, is_integer, real, seed_bits, shown
from jaxspec.sampler import (
    BIAS,
    LOGPROBS,
    MAX_SMALL_TOP_K,
    MIN_P,
    PENALTIES,
    PROMPT_LOGPROBS,
    SMALL_TOP_K,
    TEMPERATURE,
    TOP_K_TOP_P,
    Sampler,
)

MAX_N = 16_384
"""Samples that one prompt may have."""
MAX_STOPS = 256
"""Stop strings of a request: the text of each token is searched for all of them."""
MAX_STOP_LENGTH = 1024
"""Characters of a stop string: as many may be held back, and looked at with each token."""
MAX_TEMPERATURE = 1e6  # beyond it float32 scores could overflow
MAX_LOGPROBS = 20
"""Likeliest ids whose log-probabilities a program reports, whether fewer are asked for or not."""
GREEDY_BELOW = 1e-5
"""Float32 temperatures below this are greedy: scores divided by them would overflow to ties."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop, in the words of vLLM.

    `temperature` 0, or any below `GREEDY_BELOW`, is greedy. `top_k` -1 or 0 and `top_p` 1 are off.
    `stop` strings end the text before them; `stop_token_ids` are kept as the last token.
    `min_tokens` forbids stop ids before so many tokens. `min_p` keeps what is at least so likely as
    that share of the likeliest. `presence_penalty` and `frequency_penalty` count the output,
    `repetition_penalty` the prompt too. `logit_bias` adds to the logits of ids, nothing but
    `allowed_token_ids` may come, and none of the texts `bad_words`.
    `n` samples, each with noise of its own, share one prefill as far as rows are free when it ends.
    `num_speculative_tokens` is the most drafts of a verify: 0 turns speculation off for the
    request, None leaves it to the engine.
    `logprobs` asks for the log-probability of each token of the output and of that many likeliest
    ones in its place; `prompt_logprobs` for the same of the prompt. None asks for none.

    NumPy's numbers are taken, and kept as Python's.

    Raises:
        ValueError: a value outside its range; the message names the rule.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = ()
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every value, and keep it as Python's own type."""
        self._keep(
            n=integer("n", self.n, 1, MAX_N),
            temperature=_temperature(self.temperature),
            top_p=_top_p(self.top_p),
            top_k=integer("top_k", self.top_k, -1, hint="; -1 turns it off"),
            min_p=logit_values.in_range("min_p", self.min_p, 0.0, 1.0, "0 turns it off"),
            presence_penalty=logit_values.penalty("presence_penalty", self.presence_penalty),
            frequency_penalty=logit_values.penalty("frequency_penalty", self.frequency_penalty),
            repetition_penalty=logit_values.repetition_penalty(self.repetition_penalty),
            logit_bias=logit_values.logit_bias(self.logit_bias),
            allowed_token_ids=logit_values.allowed_token_ids(self.allowed_token_ids),
            bad_words=logit_values.bad_words(self.bad_words),
            seed=None if self.seed is None else seed_bits("seed", self.seed),
            max_tokens=integer("max_tokens", self.max_tokens, 1),
            min_tokens=integer("min_tokens", self.min_tokens, 0),
            stop=_stops(self.stop),
            stop_token_ids=_stop_token_ids(self.stop_token_ids),
            ignore_eos=boolean("ignore_eos", self.ignore_eos),
            num_speculative_tokens=_most_drafts(self.num_speculative_tokens),
            logprobs=_num_logprobs("logprobs", self.logprobs),
            prompt_logprobs=_num_logprobs("prompt_logprobs", self.prompt_logprobs),
        )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > {self.max_tokens}."
            )

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, by the same float32 comparison as on the device."""
        return bool(np.float32(self.temperature) < GREEDY_BELOW)

    @property
    def sampler(self) -> Sampler:
        """The least sampler that serves this request: the processors and reports that it wants."""
        draws, is_small = not self.is_greedy, 0 < self.top_k <= MAX_SMALL_TOP_K
        repeats = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        wanted = {
            BIAS: bool(self.logit_bias or self.allowed_token_ids or self.bad_words),
            PENALTIES: repeats != (0.0, 0.0, 1.0),
            MIN_P: draws and self.min_p > 0,
            TEMPERATURE: draws,
            SMALL_TOP_K: draws and is_small,
            TOP_K_TOP_P: draws and not is_small and (self.top_k > 0 or self.top_p < 1),
            LOGPROBS: self.logprobs is not None,
            PROMPT_LOGPROBS: self.prompt_logprobs is not None,
        }
        return Sampler.of(*(name for name, is_wanted in wanted.items() if is_wanted))


def _temperature(value: Any) -> float:
    temperature = real(value)
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"temperature must be a number from 0 to {MAX_TEMPERATURE:,.0f}, got {shown(value)}; 0 "
            "is greedy."
        )
    return temperature


def _top_p(value: Any) -> float:
    top_p = real(value)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {shown(value)}; 1 turns it off.")
    return top_p


def _most_drafts(value: Any) -> int | None:
    hint = "; 0 turns speculation off for a request, and None leaves it to the engine"
    return None if value is None else integer("num_speculative_tokens", value, 0, hint=hint)


def _num_logprobs(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if is_integer(value) and value == -1:
        raise ValueError(
            f"{name} must be 0 to {MAX_LOGPROBS}, got -1: the whole vocabulary is not reported. "
            f"Ask for the {MAX_LOGPROBS} likeliest."
        )
    hint = "; 0 reports the token's own alone, and None nothing"
    return integer(name, value, 0, MAX_LOGPROBS, hint=hint)


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else _listed("stop", value)
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise ValueError(f"stop strings must be non-empty strings, got {shown(list(stops))}.")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise ValueError(
            f"stop must be at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH:,} characters, "
            f"got {len(stops):,} with up to {max(map(len, stops)):,}. Give fewer or shorter ones."
        )
    return stops


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    ids = _listed("stop_token_ids", value)
    if not are_integers(ids):
        raise ValueError(
            f"stop_token_ids must be integers, got {shown(list(ids))}; texts go to stop."
        )
    return tuple(map(int, ids))


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """The entries of a list or tuple, or of a NumPy array; None is the empty one."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple | np.ndarray) or getattr(value, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a list, got {shown(value)}.")
    return tuple(value)
