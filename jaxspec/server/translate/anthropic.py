"""Conversion of Anthropic's Messages API to OpenAI's chat completions ("chats") and back.

API: https://docs.anthropic.com/en/api/messages.
"""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from jaxspec.server.translate.fields import (
    SAMPLING,
    FieldError,
    Json,
    content,
    mapping,
    named,
    new_id,
    objects,
    one_of,
    text,
)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def error(status: int, message: str) -> Json:
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def chat_request(body: Mapping[str, Any]) -> Json:
    """Convert a body of /v1/messages, or of count_tokens (without max_tokens), to a chat request.

    A final assistant message is continued.

    Raises:
        FieldError: a field is invalid, or has no counterpart in chats.
    """
    messages = [
        message
        for place, given in objects(body.get("messages"), "messages")
        for message in _messages(given, place)
    ]
    if system := content(body.get("system"), "system", ("text",)):
        messages.insert(0, {"role": "system", "content": system})
    request = named(body, SAMPLING) | {"messages": messages}
    for name, other in (("max_tokens", "max_completion_tokens"), ("stop_sequences", "stop")):
        if body.get(name) is not None:
            request[other] = body[name]
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        request |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.get("tools"):
        request["tools"] = [_tool(tool, place) for place, tool in objects(body["tools"], "tools")]
    return request | _tool_choice(body.get("tool_choice")) | _thinking(body)


def _messages(message: Mapping[str, Any], place: str) -> list[Json]:
    role = message.get("role")
    if role == "assistant":
        return [_assistant(message.get("content"), f"{place}.content")]
    if role not in ("user", "system"):
        raise FieldError(f"{place}.role", "must be 'user' or 'assistant', got {}.", role)
    given = message.get("content")
    if not isinstance(given, list):
        return [{"role": role, "content": text(given, f"{place}.content")}]
    results, parts = list[Json](), list[Any]()
    for where, part in objects(given, f"{place}.content"):
        if part.get("type") == "tool_result":
            results.append(_tool_result(part, where))
        else:
            one_of(part, where, ("text", "tool_result"))
            parts.append({"type": "text", "text": text(part.get("text"), f"{where}.text")})
    if parts:
        rest = content(parts, f"{place}.content", ("text",))
        return [*results, {"role": role, "content": rest}]
    return results


def _tool_result(part: Mapping[str, Any], place: str) -> Json:
    given = part.get("content")
    if isinstance(given, list):
        given = [_named_tool(*each) for each in objects(given, f"{place}.content")]
    output = content(given, f"{place}.content", ("text",))
    call = text(part.get("tool_use_id"), f"{place}.tool_use_id")
    return {"role": "tool", "tool_call_id": call, "content": output}


def _named_tool(place: str, part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a reference to a tool as text; the request's tools are all offered from the start."""
    if part.get("type") != "tool_reference":
        return part
    return {"type": "text", "text": text(part.get("tool_name"), f"{place}.tool_name")}


def _assistant(given: Any, place: str) -> Json:
    if isinstance(given, str):
        return {"role": "assistant", "content": given}
    texts, thoughts, calls = list[Any](), list[str](), list[Json]()
    for where, part in objects(given, place):
        kind = part.get("type")
        if kind == "text":
            texts.append({"type": "text", "text": text(part.get("text"), f"{where}.text")})
        elif kind == "thinking":
            thoughts.append(text(part.get("thinking"), f"{where}.thinking"))
        elif kind == "tool_use":
            calls.append(_call(part, where))
        elif kind != "redacted_thinking":  # encrypted: skip it
            one_of(part, where, ("text", "thinking", "tool_use"))
    message: Json = {"role": "assistant", "content": content(texts, place, ("text",))}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _call(part: Mapping[str, Any], place: str) -> Json:
    arguments = json.dumps(mapping(part.get("input"), f"{place}.input"), ensure_ascii=False)
    function = {"name": text(part.get("name"), f"{place}.name"), "arguments": arguments}
    return {"id": text(part.get("id"), f"{place}.id"), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any], place: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise FieldError(
            f"{place}.type",
            "must be 'custom', got {}. The server runs no tools: describe your own.",
            tool["type"],
        )
    schema = dict(mapping(tool.get("input_schema"), f"{place}.input_schema"))
    function = {"name": text(tool.get("name"), f"{place}.name"), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = text(tool["description"], f"{place}.description")
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Json:
    if choice is None:
        return {}
    kind = mapping(choice, "tool_choice").get("type")
    if kind == "tool":
        name = text(choice.get("name"), "tool_choice.name")
        request: Json = {"tool_choice": {"type": "function", "function": {"name": name}}}
    elif kind in _CHOICES:
        request = {"tool_choice": _CHOICES[kind]}
    else:
        raise FieldError("tool_choice.type", "must be auto, any, tool or none, got {}.", kind)
    if choice.get("disable_parallel_tool_use"):
        request["parallel_tool_calls"] = False
    return request


def _thinking(body: Mapping[str, Any]) -> Json:
    """Convert the thinking switch and budget, the effort and the schema of the answer."""
    request: Json = {}
    if body.get("thinking") is not None:
        kind = mapping(body["thinking"], "thinking").get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            rule = "must be enabled, adaptive or disabled, got {}."
            raise FieldError("thinking.type", rule, kind)
        switches = mapping(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
        request["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"} | dict(switches)
        budget = body["thinking"].get("budget_tokens")
        if budget is not None:
            if type(budget) is not int or budget < 0:
                rule = "must be a number of tokens, got {}. Leave it out for no limit."
                raise FieldError("thinking.budget_tokens", rule, budget)
            request["thinking_token_budget"] = budget
    output = mapping(body.get("output_config") or {}, "output_config")
    if output.get("effort") is not None:
        request["reasoning_effort"] = output["effort"]
    answer = output.get("format", body.get("output_format"))
    if answer is not None:
        request["response_format"] = _response_format(answer)
    return request


def _response_format(answer: Any) -> Json:
    """Convert the format of `output_config` to a chat's `response_format`."""
    place = "output_config.format"
    if mapping(answer, place).get("type") != "json_schema":
        raise FieldError(f"{place}.type", "must be 'json_schema', got {}.", answer.get("type"))
    schema = dict(mapping(answer.get("schema"), f"{place}.schema"))
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def message(chat: Mapping[str, Any]) -> Json:
    """Convert a chat completion with one choice to a message."""
    choice = chat["choices"][0]
    said = choice["message"]
    blocks: list[Json] = []
    if said.get("reasoning_content"):
        blocks.append(thinking_block(said["reasoning_content"]))
    if said.get("content"):
        blocks.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls") or ():
        function = call["function"]
        # Keep the model's JSON unparsed: Python would refuse some of its numbers.
        arguments = orjson.Fragment(function["arguments"])
        blocks.append(tool_block(function["name"], arguments, call["id"]))
    begun = empty_message(chat["model"], usage(chat["usage"]))
    return begun | {"content": blocks} | stop(choice["finish_reason"], choice.get("stop_reason"))


def empty_message(model: str, used: Json) -> Json:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": used,
    }


def thinking_block(thinking: str) -> Json:
    """Return a reasoning block with an empty signature."""
    return {"type": "thinking", "thinking": thinking, "signature": ""}


def tool_block(name: str, arguments: Json | orjson.Fragment, call_id: str | None = None) -> Json:
    call_id = call_id or new_id("toolu_")
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def stop(finish_reason: str, stop_reason: str | int | None) -> Json:
    """Convert a chat's `finish_reason` and vLLM's `stop_reason` to the stop fields."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS.get(finish_reason, "end_turn"), "stop_sequence": None}


def usage(used: Mapping[str, Any]) -> Json:
    """Convert a chat's usage; `input_tokens` excludes cached tokens."""
    cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used.get("completion_tokens") or 0,
    }
