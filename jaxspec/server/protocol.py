"""Request bodies of the routes, as pydantic models.

Values are not coerced between JSON types. Unknown fields are ignored, but likely misspellings of
known fields are refused.
"""

import dataclasses
import difflib
import itertools
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxspec.checks import shown
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.server import known_fields, structure
from jaxspec.server.http.errors import ApiError
from jaxspec.server.known_fields import Refusal, refused
from jaxspec.server.structure import ToolChoice
from jaxspec.server.translate.fields import FieldError

_LOG = logging.getLogger(__name__)
_NEAR = 0.85  # similarity from which a name counts as misspelt, such as "max_token" or "top_K"
_MAX_NAME = 64  # characters of an unknown name that are compared
_MAX_COMPARED = 32  # unknown names that are compared, at about 1 ms each
_MAX_UNKNOWN = 100
_OF_OTHERS = frozenset({"models"})  # fields of other servers that look misspelt: OpenRouter's


Json = dict[str, Any]

_Item = TypeVar("_Item")
Each = Annotated[list[_Item], Field(fail_fast=True)]
"""A list that reports only its first wrong item: a prompt may hold a million ids."""


class Body(BaseModel):
    """Common fields of requests. Unknown fields are ignored, as in vLLM."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    refusals: ClassVar[Mapping[str, Refusal]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    user: str | None = None

    def given(self) -> Json:
        """Return the fields that the request sets, including unknown ones."""
        return self.model_dump(exclude_unset=True)

    def refuse_absent(self) -> None:
        """Refuse known fields whose values are not supported.

        Raises:
            ApiError: 400, naming the field.
        """
        for name, value in (self.model_extra or {}).items():
            refusal = self.refusals.get(name)
            if refusal is not None and not refusal.takes(value):
                raise refused(name, value, refusal.why)

    @model_validator(mode="after")
    def _spelt(self) -> "Body":
        """Refuse misspelt field names, whose values would be ignored silently."""
        unknown = self.model_extra or {}
        if len(unknown) > _MAX_UNKNOWN:
            raise ValueError(
                f"there are {len(unknown):,} unknown fields, such as "
                f"{shown(next(iter(unknown)))}, and at most {_MAX_UNKNOWN} are ignored. Leave them "
                "out"
            )
        published = {*self.refusals, *self.harmless}
        unpublished = (name for name in unknown if name not in published)
        for name in itertools.islice(unpublished, _MAX_COMPARED):
            near = difflib.get_close_matches(name[:_MAX_NAME], type(self).model_fields, 1, _NEAR)
            # A name that goes on, such as repetition_penalty_range, is a field of another server.
            if near and abs(len(name) - len(near[0])) <= 2 and name not in _OF_OTHERS:
                raise ValueError(
                    f"there is no field {shown(name)}; the nearest is {near[0]!r}. Correct it, or "
                    "leave it out"
                )
            _LOG.debug("A request has the field %s, which is ignored.", shown(name))
        return self


class StreamOptions(BaseModel):
    """Additional contents of a stream."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Body):
    """Fields shared by completions and chats; null means the checkpoint's default."""

    refusals = known_fields.OF_SAMPLING
    harmless = known_fields.HARMLESS_IN_CHATS

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
    truncation_side: Literal["left", "right"] | None = None
    num_speculative_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: Each[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Literal["auto", "guidance"] | None = None
    thinking_token_budget: int | None = None
    vllm_xargs: Json | None = None

    @property
    def form_field(self) -> str | None:
        """Name of the field that gives the form of the text."""
        return structure.field_of(vars(self))

    @property
    def extra_args_field(self) -> str:
        """Name of the field that gives the arguments of logits processors."""
        return type(self).model_fields["vllm_xargs"].alias or "vllm_xargs"

    @property
    def usage_options(self) -> StreamOptions:
        """The stream options, with defaults."""
        return self.stream_options or StreamOptions()

    def refuse_absent(self) -> None:
        """Refuse as `Body` does, and also options of streams for whole answers."""
        super().refuse_absent()
        if self.stream_options is not None and not self.stream:
            raise refused(
                "stream_options", self.stream_options.model_dump(), "it goes with stream=true."
            )

    def sampling_params(
        self, default: SamplingParams, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return the request's parameters, with `default` for fields that are not given.

        `max_tokens` None means no limit except the model's context length. An answer that is not
        streamed is output in one piece, so that the event loop does not wake for each token.

        Raises:
            ValueError: a value is invalid, as in `SamplingParams`.
        """
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if self.vllm_xargs is not None:
            given["extra_args"] = self.vllm_xargs
        if self.thinking_token_budget == -1:  # unlimited, as in vLLM
            del given["thinking_token_budget"]
        return dataclasses.replace(
            default,
            **given,
            structured_outputs=structure.structured_outputs(vars(self)),
            max_tokens=max_tokens,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )


# Fields with the same name and meaning in requests and in `SamplingParams`.
_SAME = Sampling.model_fields.keys() & {each.name for each in dataclasses.fields(SamplingParams)}
_SAME -= {"logit_bias", "max_tokens", "structured_outputs"}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise ValueError(f"logit_bias must have token ids as keys, got {shown(key)}.")
    return int(key)


class TokenizeRequest(Body):
    """A text or a conversation to tokenize."""

    refusals = known_fields.OF_TOKENIZE

    prompt: str | None = None
    messages: Each[Json] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Each[Json] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Token ids to decode to text."""

    tokens: Each[int]


class CountTokensRequest(Body):
    """A conversation in Anthropic's form, to count its tokens."""

    refusals = known_fields.OF_MESSAGES
    harmless = known_fields.HARMLESS_IN_MESSAGES

    messages: Each[Json]
    system: str | Each[Json] | None = None
    tools: Each[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation in Anthropic's form, to generate the next message."""

    max_tokens: int
    stop_sequences: Each[str] | None = None
    stream: bool | None = None


class ResponseInput(Body):
    """The conversation of OpenAI's Responses API, in all its requests."""

    refusals = known_fields.OF_RESPONSES
    harmless = known_fields.HARMLESS_IN_RESPONSES

    input: str | Each[Json] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Each[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    text: Json | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def refuse_absent(self) -> None:
        """Refuse as `Body` does, and also a truncated input."""
        super().refuse_absent()
        if self.truncation == "auto":
            why = "the server keeps all of the input. Send an input that fits the model."
            raise refused("truncation", self.truncation, why)


class ResponsesRequest(ResponseInput):
    """A request of OpenAI's Responses API."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    include: Each[str] | None = None
    metadata: Json | None = None

    def refuse_absent(self) -> None:
        """Refuse as `ResponseInput` does, and also logprobs."""
        super().refuse_absent()
        if "message.output_text.logprobs" in (self.include or ()):
            raise refused("include", self.include, self.refusals["top_logprobs"].why)


class CompletionRequest(Sampling):
    """Prompts to complete, as texts or token ids; one answer holds the choices of all prompts."""

    refusals = known_fields.OF_COMPLETIONS

    prompt: str | Each[str] | Each[int] | Each[Each[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def refuse_absent(self) -> None:
        """Refuse as `Sampling` does, and also a `best_of` other than `n`."""
        super().refuse_absent()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refused("best_of", self.best_of, "every sample is answered. Use n.")

    @property
    def prompts(self) -> list[Any]:
        """The prompts as a list: texts, or lists of token ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_one else list(prompt)


class ChatCompletionRequest(Sampling):
    """A conversation, to generate the next message."""

    refusals = known_fields.OF_CHATS

    messages: Each[Json]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Each[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: Each[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    documents: Each[Json] | None = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = None
    return_tokens: bool | None = None

    def refuse_absent(self, *, trusts_template: bool = False) -> None:
        """Refuse as `Sampling` does, and also audio, templates and calls without tools.

        `trusts_template`: allow `chat_template` in the request.
        """
        super().refuse_absent()
        if self.chat_template and not trusts_template:
            why = (
                "a template is a program, and only the server's own runs. Start the server with "
                "--trust-request-chat-template to allow others."
            )
            raise refused("chat_template", self.chat_template, why)
        if self.truncation_side == "right":
            why = "the end of a chat begins the answer. Leave it out."
            raise refused("truncation_side", "right", why)
        if self.modalities is not None and self.modalities != ["text"]:
            raise refused("modalities", self.modalities, "answers are text alone.")
        try:
            choice = self.choice
        except FieldError as error:
            raise ApiError.of_value(error) from error
        if choice.mode == "required" and self.form_field not in (None, "response_format"):
            why = "the answer is a call. Leave one of the two out."
            raise refused("tool_choice", self.tool_choice, why)
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", self.top_logprobs, "it goes with logprobs=true.")
        if self.prompt_logprobs is not None and self.stream:
            why = "it goes without stream=true in chats. Leave one of the two out."
            raise refused("prompt_logprobs", self.prompt_logprobs, why)
        if self.return_tokens and not self.stream:
            raise refused("return_tokens", True, "it goes with stream=true.")

    @property
    def choice(self) -> ToolChoice:
        """The calls that the answer may have.

        Raises:
            FieldError: `tool_choice` is invalid.
        """
        is_parallel = self.parallel_tool_calls is not False
        return ToolChoice.of(self.tool_choice, self.tools or (), is_parallel=is_parallel)

    @property
    def offered_tools(self) -> list[Json]:
        """Tools passed to the chat template."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def num_logprobs(self) -> int | None:
        """Value for `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments for rendering the chat template."""
        switches = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            switches["documents"] = self.documents
        if self.reasoning_effort is not None:
            switches.setdefault("reasoning_effort", self.reasoning_effort)
            switches.setdefault("enable_thinking", self.reasoning_effort != "none")
        continues = bool(self.continue_final_message)
        begins = self.add_generation_prompt
        return {
            "tools": self.offered_tools or None,
            "add_generation_prompt": not continues if begins is None else begins,
            "continue_final_message": continues,
            "chat_template": self.chat_template,
            "chat_template_kwargs": switches,
        }
