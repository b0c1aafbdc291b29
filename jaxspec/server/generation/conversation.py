"""Conversation: generation of chat messages, for all routes with chats."""

import contextlib
import functools
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from jaxspec.checks import shown
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.structured_outputs import StructuredOutputsParams
from jaxspec.server.generation.chat_pieces import ChatPiece, ChatPieces, Choice
from jaxspec.server.generation.generation import Generation, Usage
from jaxspec.server.generation.logprobs import prompt_logprobs
from jaxspec.server.generation.service import Service
from jaxspec.server.http.errors import ApiError
from jaxspec.server.protocol import ChatCompletionRequest
from jaxspec.text.conversations import without_nulls
from jaxspec.text.parsers import starts_in_reasoning
from jaxspec.text.tokenizer import ChatPrompt

_ROLES = {"developer": "system"}  # templates use the older name


class Conversation:
    """A submitted chat request and its choices so far."""

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        generation: Generation,
        params: SamplingParams,
    ):
        """Read `generation`, submitted for `body` with `params`; see `begin`."""
        self._service, self._body, self._generation = service, body, generation
        dialect, tools = service.dialect, body.offered_tools
        is_reasoning = dialect.thinks and starts_in_reasoning(generation.streams[0].prompt or "")
        self._pieces = ChatPieces(
            body,
            lambda: dialect(starts_in_reasoning=is_reasoning, tools=tools),
            service.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._reasoning: list[str] = []  # reasoning text of all choices

    @staticmethod
    async def begin(
        service: Service, body: ChatCompletionRequest, request_id: str
    ) -> "Conversation":
        """Validate a chat and submit it to the engine.

        Raises:
            ApiError: 400, the chat is invalid.
            Exception: errors of the engine, which `errors.ApiError.of` converts.
        """
        body.refuse_absent(trusts_template=service.options.trust_request_chat_template)
        if body.offered_tools and not service.dialect.readers:
            raise ApiError(
                400,
                "tools can't be offered to this model: its chat template has no form of calls that "
                "the server knows. Leave them out, or describe them in a message.",
                param="tools",
            )
        params = chat_params(service, body)
        with service.refusing(body):
            messages = template_messages(body.messages)
        generation = await service.chat(body, messages, params, request_id, body.template_options)
        return Conversation(service, body, generation, params)

    @property
    def num_choices(self) -> int:
        return self._generation.num_choices

    @property
    def usage_so_far(self) -> Usage:
        """Usage so far, without `reasoning_tokens`."""
        return self._generation.usage

    async def pieces(self) -> AsyncGenerator[tuple[int, ChatPiece], None]:
        """Yield `(choice, piece)` for all choices as tokens are generated."""
        async with contextlib.aclosing(self._generation.deltas()) as deltas:
            async for number, delta in deltas:
                found = self._pieces.of(number, delta)
                self._reasoning += [p.text for p in found.pieces if p.kind == "reasoning"]
                is_hidden = self._body.include_reasoning is False
                yield number, found.without_reasoning() if is_hidden else found

    async def choices(self) -> list[Choice]:
        """Return all choices once they are complete."""
        found = [Choice() for _ in range(self.num_choices)]
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for number, piece in pieces:
                found[number].add(piece)
        return found

    async def answer(self, model: str) -> dict[str, Any]:
        """Return the chat completion, without `id`, `object` and `created`."""
        choices = [choice.as_object(number) for number, choice in enumerate(await self.choices())]
        usage = (await self.usage()).as_object()
        return {"model": model, "choices": choices, "usage": usage} | self.prompt_fields()

    async def usage(self) -> Usage:
        """Return the final usage; `reasoning_tokens` is counted by encoding the reasoning text."""
        if text := "".join(self._reasoning):
            encode = self._service.tokenizer.encode
            tokens = await self._service.llm.prepare(
                functools.partial(encode, text, add_special_tokens=False)
            )
            self._generation.usage.reasoning_tokens = len(tokens)
        return self._generation.usage

    def prompt_fields(self) -> dict[str, Any]:
        """Return vLLM's extra fields about the prompt, as far as the request has them."""
        fields: dict[str, Any] = {}
        (stream,) = self._generation.streams
        if self._body.prompt_logprobs is not None and stream.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(stream.prompt_logprobs)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(stream.prompt_token_ids)
        if self._body.return_prompt_text:
            fields["prompt_text"] = stream.prompt
        return fields


def chat_params(service: Service, body: ChatCompletionRequest) -> SamplingParams:
    """Return a chat's parameters, with the grammar of its tool calls.

    Raises:
        ApiError: 400, a value is invalid.
    """
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = service.sampling_params(body, most, body.num_logprobs)
    if body.skip_special_tokens is None and service.tags_are_special:
        params.skip_special_tokens = False
    form, is_token = params.structured_outputs, service.tokenizer.special_tokens.__contains__
    assert form is None or isinstance(form, StructuredOutputsParams)  # validated
    with service.refusing(body):
        grammar = body.choice.grammar(service.dialect, body.tools or (), is_token, form)
        if grammar is not None:
            params.structured_outputs = _form_of(grammar)
    return params


def _form_of(grammar: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(grammar=grammar)
    except ValueError as error:
        raise ApiError(400, f"tools can't be forced: their {error}", param="tools") from error


async def chat_prompt(service: Service, body: ChatCompletionRequest) -> ChatPrompt:
    """Return a chat's prompt without submitting it.

    Raises:
        ValueError: the messages are invalid, or the template refuses them.
    """

    def render() -> ChatPrompt:
        messages = template_messages(body.messages)
        return service.tokenizer.chat_prompt(messages, **body.template_options)

    return await service.llm.prepare(render, is_long=body.chat_template is not None)


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without nulls and empty lists of calls; arguments are objects.

    Raises:
        ValueError: there are no messages, a role is missing or a tool call is malformed.
    """
    if not messages:
        raise ValueError("messages must hold at least one message, got [].")
    return [_message(each, f"messages.{n}") for n, each in enumerate(without_nulls(messages))]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{place}.role must be a text such as 'user', got {shown(role)}. Give each message one."
        )
    converted = message | {"role": _ROLES.get(role, role)}
    if "tool_calls" in message:
        converted["tool_calls"] = _calls(message["tool_calls"], f"{place}.tool_calls")
    return converted


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"{place} must be a list of calls, got {shown(calls)}.")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{place}.{number} must be {{'function': {{'name': ..., 'arguments': ...}}}}, got "
                f"{shown(call)}."
            )
        arguments = _arguments(function.get("arguments"))
        found.append(call | {"function": function | {"arguments": arguments}})
    return found


def _arguments(value: Any) -> dict[str, Any]:
    """Return a call's arguments as an object, whatever a model or a stream cut off has written.

    Agents keep such calls in the history, with the tool's error.
    """
    try:
        found = orjson.loads(value or "{}") if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        found = value
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"arguments": value}
