"""Conversion of OpenAI's Responses API to chat completions and back.

API: https://platform.openai.com/docs/api-reference/responses.
"""

import base64
import binascii
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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

_LOG = logging.getLogger(__name__)
_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_ITEMS = ("message", *_CALLS, *_OUTPUTS, "reasoning")
_RUN_ELSEWHERE = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
    *("tool_search_call", "tool_search_output", "mcp_list_tools", "mcp_call"),
)
"""Items about tools that other servers run; the model does not read them."""
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")


def chat_request(body: Mapping[str, Any], earlier: Sequence[Json] = ()) -> Json:
    """Convert a body of /v1/responses to a chat request, after the `earlier` items.

    The functions of the request are offered, those of a namespace under a joined name. Tools of
    other types are not: agents send tools such as `web_search` beside their own to every server.

    Raises:
        FieldError: a field is invalid.
    """
    given = body.get("input")
    if given is None and not earlier:
        raise FieldError("input", "must be a text or a list of items, got {}.", None)
    given = input_items(() if given is None else given)
    messages = _messages([*objects(earlier, "earlier"), *objects(given, "input")])
    if body.get("instructions"):
        instructions = text(body["instructions"], "instructions")
        messages.insert(0, {"role": "system", "content": instructions})
    request = named(body, (*SAMPLING, "parallel_tool_calls")) | {"messages": messages}
    if body.get("max_output_tokens") is not None:
        request["max_completion_tokens"] = body["max_output_tokens"]
    if tools := [_tool(*found) for found in _functions(body.get("tools") or (), "tools")]:
        _check_names(tools)
        request["tools"] = tools
    choice = _tool_choice(body.get("tool_choice"))
    if choice is not None and not (choice == "auto" and not tools):
        request["tool_choice"] = choice  # clients send "auto" by default, even without tools
    effort = mapping(body.get("reasoning") or {}, "reasoning").get("effort")
    if effort is not None:
        request["reasoning_effort"] = effort
    answer = mapping(body.get("text") or {}, "text").get("format")
    if answer is not None:
        request["response_format"] = _response_format(mapping(answer, "text.format"))
    return request


def _tool_choice(choice: Any) -> Any:
    """Convert a choice of functions to a chat's, which nests their names."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") != "allowed_tools":
        return dict(choice)
    allowed = [
        {"type": "function", "function": {"name": tool.get("name")}}
        for _, tool in objects(choice.get("tools"), "tool_choice.tools")
        if tool.get("type") == "function"
    ]
    narrowed = {"mode": choice.get("mode", "auto"), "tools": allowed}
    return {"type": "allowed_tools", "allowed_tools": narrowed}


def _response_format(answer: Mapping[str, Any]) -> Json:
    """Convert `text.format` to a chat's `response_format`, which nests the schema."""
    if answer.get("type") != "json_schema":
        return dict(answer)
    schema = {name: value for name, value in answer.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _functions(
    tools: Any, place: str, namespace: str | None = None
) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """Yield the path, the function and the namespace of each function among tools."""
    for where, tool in objects(tools, place):
        kind = text(tool.get("type"), f"{where}.type")
        if kind == "function":
            yield where, tool, namespace
        elif kind == "namespace" and namespace is None:
            inner = text(tool.get("name"), f"{where}.name")
            yield from _functions(tool.get("tools") or (), f"{where}.tools", inner)
        else:
            _LOG.debug("A request has a tool of the type %s, which is not offered.", kind[:64])


def _tool(place: str, tool: Mapping[str, Any], namespace: str | None) -> Json:
    name = _joined_name(text(tool.get("name"), f"{place}.name"), namespace)
    function = named(tool, ("description", "parameters", "strict"))
    return {"type": "function", "function": {"name": name} | function}


def _check_names(tools: list[Json]) -> None:
    seen = set[str]()
    for tool in tools:
        name = tool["function"]["name"]
        if name in seen:
            rule = "must have functions of different names, got {} twice. Rename one."
            raise FieldError("tools", rule, name)
        seen.add(name)


def _joined_name(name: str, namespace: str | None) -> str:
    """Return the name under which a function of a namespace is offered: "mcp__files__read"."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def names_of_calls(body: Mapping[str, Any]) -> dict[str, Json]:
    """Return the fields `name` and `namespace` of calls, by the name that a model calls."""
    return {
        _joined_name(tool["name"], namespace): {"name": tool["name"], "namespace": namespace}
        for _, tool, namespace in _functions(body.get("tools") or (), "tools")
        if namespace is not None
    }


def input_items(given: Any) -> Any:
    """Return an input as items; a text is a message of the user."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def _messages(items: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Json]:
    """Convert items to messages; adjacent assistant items with one content are merged."""
    messages = list[Json]()
    for place, item in items:
        if item.get("type") in _RUN_ELSEWHERE or _is_foreign_compaction(item):
            continue
        message = _message(item, place)
        last = messages[-1] if messages else {}
        goes_on = message["role"] == last.get("role") == "assistant"
        if goes_on and not (last["content"] and message["content"]):
            messages[-1] = _joined(last, message)
        else:
            messages.append(message)
    return messages


def _joined(first: Json, second: Json) -> Json:
    """Merge two assistant messages, of which at most one has content."""
    thoughts = [one["reasoning_content"] for one in (first, second) if "reasoning_content" in one]
    calls = first.get("tool_calls", []) + second.get("tool_calls", [])
    message: Json = {"role": "assistant", "content": first["content"] or second["content"]}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _message(item: Mapping[str, Any], place: str) -> Json:
    """Convert one item to a message, or to a part of the assistant's message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise FieldError(
                f"{place}.role", f"must be one of {', '.join(_ROLES)}, got {{}}.", role
            )
        return {"role": role, "content": content(item.get("content"), f"{place}.content", _TEXTS)}
    if kind in _CALLS:
        call_id = text(item.get("call_id") or item.get("id"), f"{place}.call_id")
        function = _called(item, place)
        calls = [{"id": call_id, "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if kind in _OUTPUTS:
        output = content(item.get("output"), f"{place}.output", _TEXTS)
        call_id = text(item.get("call_id"), f"{place}.call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    if kind == "compaction":
        return {"role": "user", "content": _summary(item, f"{place}.encrypted_content")}
    one_of(item, place, _ITEMS)
    thoughts = [
        text(one_of(part, where, ("reasoning_text", "summary_text")).get("text"), f"{where}.text")
        for name in ("content", "summary")
        for where, part in objects(item.get(name) or (), f"{place}.{name}")
    ]
    return {"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)}


def _called(item: Mapping[str, Any], place: str) -> Json:
    """Convert a call in the history to a chat's, with its arguments as JSON text."""
    if item["type"] == "local_shell_call":
        return {"name": "local_shell", "arguments": json.dumps(item.get("action") or {})}
    namespace = item.get("namespace")
    if namespace is not None:
        namespace = text(namespace, f"{place}.namespace")
    name = _joined_name(text(item.get("name"), f"{place}.name"), namespace)
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": text(item.get("input"), f"{place}.input")})
    else:
        arguments = text(item.get("arguments"), f"{place}.arguments")
    return {"name": name, "arguments": arguments}


COMPACT = (
    "Summarize this conversation, so that it can go on from your summary alone: the task, what was "
    "decided and done, what is open, and all names, paths and values that matter. Write nothing "
    "else."
)
_OWN, _SUMMARY = "jaxspec:", "Summary of the conversation before this point:\n"


def compacted(items: Iterable[Json], chat: Mapping[str, Any]) -> Json:
    """Return a conversation's compaction: the user's messages, and the summary in `chat`."""
    kept = [
        {"id": new_id("msg_"), **item, "type": "message", "status": "completed"}
        for item in items
        if item.get("type", "message") == "message" and item.get("role") == "user"
    ]
    written = chat["choices"][0]["message"]["content"] or ""
    sealed = _OWN + base64.b64encode(written.encode()).decode()
    return {
        "id": new_id("resp_"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [
            *(item | {"content": _parts(item.get("content"))} for item in kept),
            {"id": new_id("cmp_"), "type": "compaction", "encrypted_content": sealed},
        ],
        "usage": usage(chat["usage"]),
    }


def _parts(given: Any) -> Any:
    return [{"type": "input_text", "text": given}] if isinstance(given, str) else given


def _is_foreign_compaction(item: Mapping[str, Any]) -> bool:
    """Return whether another server has compacted items, which only that server can read."""
    sealed = item.get("encrypted_content")
    is_own = isinstance(sealed, str) and sealed.startswith(_OWN)
    return item.get("type") == "compaction" and not is_own


def _summary(item: Mapping[str, Any], place: str) -> str:
    try:
        raw = base64.b64decode(item["encrypted_content"].removeprefix(_OWN), validate=True)
        return _SUMMARY + raw.decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        rule = "must be as /v1/responses/compact returned it, got {}. Send it unchanged."
        raise FieldError(place, rule, item["encrypted_content"]) from error


def begin(body: Mapping[str, Any], model: str) -> Json:
    tools = [
        {"strict": None, "parameters": {}, **tool} if tool.get("type") == "function" else dict(tool)
        for _, tool in objects(body.get("tools") or (), "tools")
    ]
    parallel = body.get("parallel_tool_calls")
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": True if parallel is None else parallel,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": tools,
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "truncation": "disabled",
        "previous_response_id": body.get("previous_response_id"),
        "store": bool(body.get("store")),
        "usage": None,
    } | {name: body.get(name) for name in _ECHOED}


def end(
    response: Mapping[str, Any],
    output: Iterable[Json],
    finish_reason: str,
    used: Mapping[str, Any],
) -> Json:
    """Return a finished response, from its output and a chat's `finish_reason` and usage."""
    ended = dict(response) | {"output": list(output), "usage": usage(used)}
    if finish_reason == "length":
        return ended | {
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
        }
    return ended | {"status": "completed"}


def response(body: Mapping[str, Any], chat: Mapping[str, Any]) -> Json:
    """Convert the chat completion of a request, with one choice, to a response."""
    choice = chat["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    status = "incomplete" if reason == "length" else "completed"
    output: list[Json] = []
    if message.get("reasoning_content"):
        output.append(reasoning_item(message["reasoning_content"]) | {"status": "completed"})
    if message.get("content"):
        output.append(message_item(message["content"]) | {"status": "completed"})
    names = names_of_calls(body)
    for call in message.get("tool_calls") or ():
        item = call_item(**call["function"], call_id=call["id"])
        item |= names.get(item["name"], {})
        output.append(item | {"status": "completed"})
    if output:
        output[-1]["status"] = status
    return end(begin(body, chat["model"]), output, reason, chat["usage"])


def reasoning_item(thinking: str | None = None) -> Json:
    """Return a reasoning item; None means no text yet."""
    parts = [] if thinking is None else [{"type": "reasoning_text", "text": thinking}]
    return {"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": parts}


def message_item(written: str | None = None) -> Json:
    """Return a message item; None means no text yet."""
    parts = [] if written is None else [text_part(written)]
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": parts}


def text_part(written: str) -> Json:
    return {"type": "output_text", "text": written, "annotations": [], "logprobs": []}


def call_item(name: str, arguments: str = "", call_id: str | None = None) -> Json:
    call_id = call_id or new_id("call_")
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": new_id("fc_"), "type": "function_call", **call}


def usage(used: Mapping[str, Any]) -> Json:
    """Convert a chat's usage to the names of this API."""
    cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thinking = (used.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    made = used.get("completion_tokens") or 0
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": used["prompt_tokens"] + made,
    }
