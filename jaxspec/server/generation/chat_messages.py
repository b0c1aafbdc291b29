"""Conversion of OpenAI's chat messages to the form that chat templates expect."""

from typing import Any

import orjson

from jaxspec.checks import shown

_ROLES = {"developer": "system"}  # templates use the older name


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without nulls, and with tool call arguments as objects.

    Raises:
        ValueError: there are no messages, a role is missing or a tool call is malformed.
    """
    if not messages:
        raise ValueError("messages must hold at least one message, got [].")
    return [_message(message, f"messages.{n}") for n, message in enumerate(messages)]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{place}.role must be a text such as 'user', got {shown(role)}. Give each message one."
        )
    told = {name: value for name, value in message.items() if value is not None}
    told["role"] = _ROLES.get(role, role)
    told.setdefault("content", "")
    if "tool_calls" in told:
        told["tool_calls"] = _calls(told["tool_calls"], f"{place}.tool_calls")
    return told


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
        arguments = _arguments(function.get("arguments"), f"{place}.{number}.function.arguments")
        found.append(call | {"function": function | {"arguments": arguments}})
    return found


def _arguments(value: Any, place: str) -> dict[str, Any]:
    try:
        found = orjson.loads(value or "{}") if value is None or isinstance(value, str) else value
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{place} must be a JSON object as text, got {shown(value)}.")
    return found
