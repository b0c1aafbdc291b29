"""How to choose tokens and when to stop, as the caller says it."""

import dataclasses
import enum
from dataclasses import InitVar
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


class RequestOutputKind(enum.Enum):
    """What a piece of a stream holds."""

    CUMULATIVE = 0  # all that came so far
    DELTA = 1  # what came since the piece before
    FINAL_ONLY = 2  # all of it, in one piece at the end


@dataclasses.dataclass(slots=True)
class SamplingParams:
    """How to choose tokens and when to stop, in the words of vLLM.

    `temperature` 0, or any below `GREEDY_BELOW`, is greedy. `top_k` -1 or 0 and `top_p` 1 are off.
    `min_p` keeps what is at least so likely as that share of the likeliest. `presence_penalty` and
    `frequency_penalty` count the output, `repetition_penalty` the prompt too. `logit_bias` adds to
    the logits of ids, nothing but `allowed_token_ids` may come, and none of the texts `bad_words`.
    `n` samples, each with noise of its own, share one prefill as far as rows are free when it ends.
    `seed` repeats a text; None draws another one each time.
    `logprobs` asks for the log-probability of each token of the output and of that many likeliest
    ones in its place; `prompt_logprobs` for the same of the prompt. None asks for none.

    `max_tokens` None is as many as fit behind the prompt, and more than fit are those that fit.
    `stop` strings end the text before them, or behind with `include_stop_str_in_output`.
    `stop_token_ids` end it too. They and the model's own ends are kept as the last token, and shown
    in the text only with `include_stop_str_in_output`. `min_tokens` tokens come before any of these
    may end it. `ignore_eos` goes on behind the model's own ends.

    `detokenize` False makes no text. `skip_special_tokens` leaves special tokens out of the text.
    `truncate_prompt_tokens` keeps so many of the prompt's last tokens; -1 keeps as many as leave
    room for `max_tokens`. `output_kind` says what the pieces of a stream hold.
    `num_speculative_tokens` is the most drafts of a verify: 0 turns speculation off for the
    request, None leaves it to the engine.

    The defaults are vLLM's, but for `max_tokens` (16 there) and `output_kind` (CUMULATIVE there).
    An object may be changed until it is used: a call checks it again and keeps a copy of its own.
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
    bad_words: list[str] | tuple[str, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    num_speculative_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: InitVar[Any] = None  # these are refused: see `_refuse`
    guided_decoding: InitVar[Any] = None
    response_format: InitVar[Any] = None

    def __post_init__(
        self, structured_outputs: Any, guided_decoding: Any, response_format: Any
    ) -> None:
        """Check every value, and keep it as Python's own type."""
        _refuse(
            structured_outputs=structured_outputs,
            guided_decoding=guided_decoding,
            response_format=response_format,
        )
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
            max_tokens=_max_tokens(self.max_tokens),
            min_tokens=integer("min_tokens", self.min_tokens, 0),
            stop=_stops(self.stop),
            stop_token_ids=_stop_token_ids(self.stop_token_ids),
            include_stop_str_in_output=self._flag("include_stop_str_in_output"),
            ignore_eos=self._flag("ignore_eos"),
            detokenize=self._flag("detokenize"),
            skip_special_tokens=self._flag("skip_special_tokens"),
            spaces_between_special_tokens=self._flag("spaces_between_special_tokens"),
            truncate_prompt_tokens=_truncation(self.truncate_prompt_tokens),
            output_kind=_output_kind(self.output_kind),
            num_speculative_tokens=_most_drafts(self.num_speculative_tokens),
            logprobs=_num_logprobs("logprobs", self.logprobs),
            prompt_logprobs=_num_logprobs("prompt_logprobs", self.prompt_logprobs),
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > {self.max_tokens}."
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop strings are looked for in the text, and detokenize=False makes none; got "
                f"stop={shown(self.stop)}. Use stop_token_ids, or leave detokenize=True."
            )

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one, checked as if it were built now.

        Raises:
            ValueError: as in `SamplingParams`, for what was assigned since.
        """
        return dataclasses.replace(self)

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _flag(self, name: str) -> bool:
        return boolean(name, getattr(self, name))

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


def _refuse(**values: Any) -> None:
    """Refuse what jaxspec does not do yet."""
    for name, value in values.items():
        if value is not None:
            raise ValueError(
                f"{name} asks for structured output, which jaxspec does not have yet, got "
                f"{shown(value)}. Leave it out, and check the text behind the call."
            )


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


def _max_tokens(value: Any) -> int | None:
    return None if value is None else integer("max_tokens", value, 1)


def _truncation(value: Any) -> int | None:
    name, hint = "truncate_prompt_tokens", "; -1 keeps as many as fit"
    kept = None if value is None else integer(name, value, -1, hint=hint)
    if kept == 0:
        raise ValueError(
            f"{name} must be None, -1 or the number of tokens to keep, got {shown(value)}{hint}."
        )
    return kept


def _output_kind(value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        words = ", ".join(map(str, RequestOutputKind))
        raise ValueError(f"output_kind must be one of {words}, got {shown(value)}.")
    return value


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


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else _listed("stop", value)
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise ValueError(f"stop strings must be non-empty strings, got {shown(stops)}.")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise ValueError(
            f"stop must be at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH:,} characters, "
            f"got {len(stops):,} with up to {max(map(len, stops)):,}. Give fewer or shorter ones."
        )
    return stops


def _stop_token_ids(value: Any) -> list[int]:
    ids = _listed("stop_token_ids", value)
    if not are_integers(ids):
        raise ValueError(f"stop_token_ids must be integers, got {shown(ids)}; texts go to stop.")
    return list(map(int, ids))


def _listed(name: str, value: Any) -> list[Any]:
    """The entries of a list or tuple, or of a NumPy array; None is the empty one."""
    if value is None:
        return []
    if not isinstance(value, list | tuple | np.ndarray) or getattr(value, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a list, got {shown(value)}.")
    return list(value)
