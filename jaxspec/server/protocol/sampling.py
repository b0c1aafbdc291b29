"""Sampling: the fields of a request that choose tokens, and what is refused among them."""

import dataclasses
from typing import Any

from jaxspec.checks import shown
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.server.errors import ApiError
from jaxspec.server.protocol.body import Body, Each, Json, StreamOptions

_STRUCTURED = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structural_tag",
)
_ABSENT = {
    "use_beam_search": "beam search is a call of the library, LLM.beam_search",
    "prompt_embeds": "prompts are texts or token ids",
    "logits_processors": "nothing of a request is run as code",
    "kv_transfer_params": "the KV cache stays in this process",
    "mm_processor_kwargs": "prompts are text alone",
}
# Fields of `SamplingParams` that requests have under the same name.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "num_speculative_tokens",
    "prompt_logprobs",
)


class Sampling(Body):
    """Fields that completions and chats share; null stands for the checkpoint's own default."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Each[int] | None = None
    bad_words: Each[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Each[str] | None = None
    stop_token_ids: Each[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    num_speculative_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: Json | None = None

    def refuse_absent(self) -> None:
        """Refuse what is known and can't be done.

        Raises:
            ApiError: 400, which names the field.
        """
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise _no_structure("response_format", self.response_format)
        extra = self.model_extra or {}
        for name in _STRUCTURED:
            if extra.get(name) is not None:
                raise _no_structure(name, extra[name])
        for name, why in _ABSENT.items():
            if extra.get(name):
                raise refused(name, extra[name], f"{why}. Leave it out.")
        if self.stream_options is not None and not self.stream:
            raise refused(
                "stream_options", self.stream_options.model_dump(), "it goes with stream=true."
            )

    def sampling_params(
        self, default: SamplingParams, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The parameters: what is given, and `default` for the rest.

        `max_tokens` None is the room that the prompt leaves. An answer that is not streamed comes
        in one piece, so that the event loop is not woken before its end.

        Raises:
            ValueError: as in `SamplingParams`.
        """
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return dataclasses.replace(
            default, **given, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind
        )


def refused(name: str, value: Any, why: str) -> ApiError:
    """The error of a field that is known and can't be done."""
    return ApiError(400, f"{name} can't be {shown(value)}: {why}", param=name)


def _no_structure(name: str, value: Any) -> ApiError:
    return refused(
        name,
        value,
        "it asks for structured output, which jaxspec does not have yet. Leave it out, and check "
        "the text that comes.",
    )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise ValueError(f"logit_bias must have token ids as keys, got {shown(key)}.")
    return int(key)
