"""SamplingParams: how a request chooses tokens and when it stops; with their validation."""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import InitVar
from typing import Any

import numpy as np

from jaxspec.checks import are_integers, boolean, integer, is_integer, real, seed_bits, shown
from jaxspec.requests.logits_processors import extra_args
from jaxspec.requests.sampling_features import (
    BIAS,
    LOGPROBS,
    MAX_SMALL_TOP_K,
    MIN_P,
    PENALTIES,
    PROMPT_LOGPROBS,
    SMALL_TOP_K,
    TEMPERATURE,
    TOP_K_TOP_P,
    SamplingFeatures,
)
from jaxspec.requests.structured_outputs import StructuredOutputsParams

MAX_REPETITION = 1e6  # the least is 1 / MAX_REPETITION; float32 logits could overflow beyond
MAX_LOGIT_BIAS = 1e6
"""Largest absolute logit bias; in practice -100 forbids an id and +100 forces it."""
MAX_BAD_WORD_TEXTS = 128
"""Most strings in `bad_words`."""
MAX_BAD_WORD_LENGTH = 1024
"""Most characters of a string in `bad_words`."""


def in_range(name: str, value: Any, least: float, most: float, hint: str) -> float:
    """Return `value` as a Python float.

    Raises:
        ValueError: it is not a number from `least` to `most`; the message ends with `hint`.
    """
    number = real(value)
    if not least <= number <= most:
        raise ValueError(
            f"{name} must be a number from {least:g} to {most:g}, got {shown(value)}; {hint}."
        )
    return number


def penalty(name: str, value: Any) -> float:
    """Validate a presence or frequency penalty, from -2 to 2."""
    return in_range(name, value, -2.0, 2.0, "0 turns it off")


def repetition_penalty(value: Any) -> float:
    """Validate a repetition penalty, from 1e-6 to 1e6."""
    least = 1 / MAX_REPETITION
    return in_range("repetition_penalty", value, least, MAX_REPETITION, "1 turns it off")


def logit_bias(value: Any) -> dict[int, float] | None:
    """Return the biases by id as Python numbers, or None if there are none.

    Raises:
        ValueError: `value` is not a mapping of integers to numbers of at most `MAX_LOGIT_BIAS`.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not are_integers(value):
        raise ValueError(
            f"logit_bias must be a dict of token ids and biases, got {shown(value)}. Write it as "
            "in {42: -1.5}."
        )
    hint = f"-{MAX_LOGIT_BIAS:,g} forbids an id"
    biases = {
        int(token): in_range(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, hint)
        for token, bias in value.items()
    }
    return biases or None


def allowed_token_ids(value: Any) -> list[int] | None:
    """Return the ids as Python integers; None allows all.

    Raises:
        ValueError: `value` is empty or not a list of integers.
    """
    if value is None:
        return None
    is_list = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)
    if not is_list or not len(value) or not are_integers(value):
        raise ValueError(
            f"allowed_token_ids must be a list of at least one token id, got {shown(value)}. None "
            "allows all."
        )
    return list(map(int, value))


def bad_words(value: Any) -> list[str]:
    """Return the strings as a list, which is empty for None.

    Raises:
        ValueError: `value` is not a list of non-blank strings, or one of the limits is exceeded.
    """
    if value is None:
        return []
    if not isinstance(value, list | tuple) or any(
        not isinstance(word, str) or not word.strip() for word in value
    ):
        raise ValueError(
            f"bad_words must be a list of texts that are not empty, got {shown(value)}. A single "
            "text goes in as a list of one."
        )
    if len(value) > MAX_BAD_WORD_TEXTS or any(len(word) > MAX_BAD_WORD_LENGTH for word in value):
        raise ValueError(
            f"bad_words must be at most {MAX_BAD_WORD_TEXTS} texts of at most "
            f"{MAX_BAD_WORD_LENGTH:,} characters, got {len(value):,} with up to "
            f"{max(map(len, value)):,}. Give fewer or shorter ones."
        )
    return list(value)


MAX_N = 16_384
"""Most samples of one prompt."""
MAX_STOPS = 256
"""Most stop strings of a request: the text of each token is searched for all of them."""
MAX_STOP_LENGTH = 1024
"""Most characters of a stop string: as many may be held back and searched with each token."""
MAX_TEMPERATURE = 1e6  # float32 scores could overflow beyond
MAX_LOGPROBS = 20
"""Number of likeliest ids whose logits a program reports, even for requests with fewer."""
LOGPROBS_MODES = RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
GREEDY_BELOW = 1e-5
"""Float32 temperatures below this are greedy: scores divided by them would overflow to ties."""


class RequestOutputKind(enum.Enum):
    """Contents of the `RequestOutput`s of `AsyncLLM.generate` and `LLMEngine.step`.

    `TextDelta`s always have what is new; with FINAL_ONLY a sample has one, at its end.
    """

    CUMULATIVE = 0  # all output so far
    DELTA = 1  # output since the previous one
    FINAL_ONLY = 2  # all output, once at the end


@dataclasses.dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of a request, under vLLM's names.

    The defaults are those of vLLM, except `max_tokens` (16 in vLLM). An object may be modified
    until it is used: each call validates it again and copies it. NumPy numbers are converted to
    Python numbers.

    Attributes:
        n: Number of samples per prompt. They have independent noise, and share one prefill as far
            as rows are free when it ends.
        temperature: Divisor of the logits; 0, or any value below `GREEDY_BELOW`, is greedy.
        top_p: Keep the likeliest ids up to this total probability, in (0, 1]; 1 turns it off.
        top_k: Number of likeliest ids to keep; -1 or 0 turns it off.
        min_p: Keep ids at least this fraction as likely as the likeliest id; 0 turns it off.
        presence_penalty: Subtracted from the logits of ids in the output, from -2 to 2.
        frequency_penalty: Subtracted once per occurrence in the output, from -2 to 2.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of ids in the
            prompt or output; 1 turns it off.
        logit_bias: Values added to the logits, by id.
        allowed_token_ids: The only ids that may be generated; None allows all.
        bad_words: Strings that may not be generated.
        seed: 64-bit seed of the noise: equal seeds repeat the samples of a prompt. None derives a
            new one for each prompt from the engine's `seed`.
        max_tokens: Most output tokens; None, or more than fit in `max_model_len`, means as many as
            fit.
        min_tokens: Number of output tokens before a stop string or stop id may end the sample.
        stop: String or strings that end the sample; the text ends before the string.
        stop_token_ids: Ids that end the sample. They and the model's EOS ids are kept as the last
            token, but not in the text.
        include_stop_str_in_output: Include the final stop string or stop id in the text.
        ignore_eos: Continue after the model's EOS ids.
        detokenize: Decode the output; False leaves the text empty.
        skip_special_tokens: Omit special tokens from the text.
        spaces_between_special_tokens: Accepted as in vLLM; False is refused for tokenizers whose
            decoder separates all tokens by spaces.
        truncate_prompt_tokens: Number of final prompt tokens to keep; -1 keeps as many as leave
            room for `max_tokens`.
        output_kind: Contents of the outputs of a request that is read while it runs.
        num_speculative_tokens: Most drafts per verify step; 0 turns speculation off for the
            request, and None uses the engine's number.
        logprobs: Number of likeliest ids, from 0 to 20, whose log-probabilities are returned at
            each output position, besides that of the token itself. None returns none.
        prompt_logprobs: The same for the prompt.
        logprobs_mode: "raw_logprobs" are those of the model's own logits. "processed_logprobs" are
            those of the distribution that the token is drawn from, after all processors; of a
            greedy request, after those that apply to it. Of a prompt, temperature, min-p, top-k and
            top-p apply. None means the engine's option.
        structured_outputs: Form of the text, as parameters or as a dict of their fields; after the
            reasoning of a model that thinks. None means free text.
        thinking_token_budget: Most tokens of the model's reasoning, after which only those of
            `</think>` are allowed. None means unlimited.
        routed_experts_prompt_start: Index of the first prompt token whose routed experts are
            returned, if the engine returns them; the prompt's length, or more, returns those of
            the output alone.
        extra_args: Arguments of the engine's logits processors, by name: numbers, texts, bools, or
            lists of them. None uses no processor.

    Raises:
        ValueError: a value is outside its range; the message states the rule.
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
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    num_speculative_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    routed_experts_prompt_start: int = 0
    extra_args: dict[str, Any] | None = None
    guided_decoding: InitVar[Any] = None
    response_format: InitVar[Any] = None
    logits_processors: InitVar[Any] = None

    def __post_init__(
        self, guided_decoding: Any, response_format: Any, logits_processors: Any
    ) -> None:
        """Validate every value and store it as a Python type."""
        _refuse_response_format(response_format)
        _refuse_logits_processors(logits_processors)
        self._keep(
            structured_outputs=_structured_outputs(self.structured_outputs, guided_decoding),
            thinking_token_budget=_thinking_token_budget(self.thinking_token_budget),
            extra_args=extra_args(self.extra_args),
            n=integer("n", self.n, 1, MAX_N),
            temperature=_temperature(self.temperature),
            top_p=_top_p(self.top_p),
            top_k=integer("top_k", self.top_k, -1, hint="; -1 turns it off"),
            min_p=in_range("min_p", self.min_p, 0.0, 1.0, "0 turns it off"),
            presence_penalty=penalty("presence_penalty", self.presence_penalty),
            frequency_penalty=penalty("frequency_penalty", self.frequency_penalty),
            repetition_penalty=repetition_penalty(self.repetition_penalty),
            logit_bias=logit_bias(self.logit_bias),
            allowed_token_ids=allowed_token_ids(self.allowed_token_ids),
            bad_words=bad_words(self.bad_words),
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
            logprobs_mode=_logprobs_mode(self.logprobs_mode),
            routed_experts_prompt_start=integer(
                "routed_experts_prompt_start", self.routed_experts_prompt_start, 0
            ),
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > {self.max_tokens}."
            )
        if self.structured_outputs is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                "structured_outputs end where the text is complete, got ignore_eos="
                f"{self.ignore_eos} and min_tokens={self.min_tokens}. Leave both out."
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop strings are looked for in the text, and detokenize=False makes none; got "
                f"stop={shown(self.stop)}. Use stop_token_ids, or leave detokenize=True."
            )

    def clone(self) -> "SamplingParams":
        """Return an independent copy, validated like a new object.

        Raises:
            ValueError: as in `SamplingParams`, for values assigned since.
        """
        return dataclasses.replace(self)

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _flag(self, name: str) -> bool:
        return boolean(name, getattr(self, name))

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is chosen; compared in float32, as on the device."""
        return bool(np.float32(self.temperature) < GREEDY_BELOW)

    @property
    def has_grammar(self) -> bool:
        """True if the tokens allowed at a position depend on those before it."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def features(self) -> SamplingFeatures:
        """The smallest set of processors and reports that serves this request."""
        draws, is_small = not self.is_greedy, 0 < self.top_k <= MAX_SMALL_TOP_K
        repeats = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        wanted = {
            BIAS: bool(self.logit_bias or self.allowed_token_ids or self.bad_words)
            or self.has_grammar,
            PENALTIES: repeats != (0.0, 0.0, 1.0),
            MIN_P: draws and self.min_p > 0,
            TEMPERATURE: draws,
            SMALL_TOP_K: draws and is_small,
            TOP_K_TOP_P: draws and not is_small and (self.top_k > 0 or self.top_p < 1),
            LOGPROBS: self.logprobs is not None,
            PROMPT_LOGPROBS: self.prompt_logprobs is not None,
        }
        return SamplingFeatures.of(*(name for name, is_wanted in wanted.items() if is_wanted))


def _structured_outputs(value: Any, guided_decoding: Any) -> StructuredOutputsParams | None:
    """Return the form of the text; `guided_decoding` is vLLM's former name of it."""
    if value is not None and guided_decoding is not None:
        raise ValueError(
            "guided_decoding is the former name of structured_outputs, got both. Leave it out."
        )
    value = guided_decoding if value is None else value
    return None if value is None else StructuredOutputsParams.of(value)


def _refuse_response_format(value: Any) -> None:
    if value is not None:
        raise ValueError(
            f"response_format is a field of the HTTP API, got {shown(value)}. Use "
            "structured_outputs={'json': schema}, or {'json_object': True}."
        )


def _refuse_logits_processors(value: Any) -> None:
    if value:
        raise ValueError(
            "logits_processors are an option of the engine, because they are compiled into its "
            f"steps, got {shown(value)}. Use LLM(logits_processors=[...]), and extra_args for "
            "the arguments of a request."
        )


def _thinking_token_budget(value: Any) -> int | None:
    hint = "; None sets no limit"
    return None if value is None else integer("thinking_token_budget", value, 0, hint=hint)


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


def _logprobs_mode(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value in LOGPROBS_MODES):
        raise ValueError(
            f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)} or None, the engine's, got "
            f"{shown(value)}. Logits are not reported."
        )
    return value


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
    """Return the entries of a list, tuple or 1-D NumPy array as a list; None is empty."""
    if value is None:
        return []
    if not isinstance(value, list | tuple | np.ndarray) or getattr(value, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a list, got {shown(value)}.")
    return list(value)
