"""Conversations of a call: splitting into conversations, options, and contents of messages."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from jaxspec.checks import items, shown

Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages of the form `{"role": ..., "content": ...}`."""
MAX_CONVERSATIONS = 2**16
_TEXT_KINDS = ("text", "input_text", "output_text")
# A template that loops over a message's content gets a list of parts; others get a string.
_WALKS_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+[\w.\[\]'\"]*content\b")
_EXAMPLE = '[{"role": "user", "content": "Hi"}]'


class TemplateOptions(TypedDict, total=False):
    """Options of `LLM.chat` for rendering a conversation."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError if an option is not in `TemplateOptions`."""
    known = TemplateOptions.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise TypeError(
                f"A chat has no argument {name!r}; the nearest is {near!r}. A switch of the "
                "template's own goes into chat_template_kwargs, a dict."
            )


def conversations_of(messages: Any) -> list[Any]:
    """Return a list of conversations, given one list of messages or a list of such lists.

    Raises:
        ValueError: `messages` is neither, or has more than `MAX_CONVERSATIONS` conversations.
    """
    found = items(messages, MAX_CONVERSATIONS)
    if not found or isinstance(found[0], Mapping):
        return [found if isinstance(messages, Iterator) else messages]
    if len(found) > MAX_CONVERSATIONS:
        raise ValueError(
            f"One call may have at most {MAX_CONVERSATIONS:,} conversations, got more. Make "
            "several calls."
        )
    if any(items(each, 0) is None for each in found):
        raise ValueError(
            f"messages must be a list of messages such as {_EXAMPLE}, or a list of such lists, got "
            f"{shown(messages)}."
        )
    return found


def without_nulls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without keys that are None and without empty lists of calls.

    A message without content gets an empty one. Clients write `"content": None` beside tool calls,
    and templates would write "None"; templates also test whether the key `tool_calls` exists.
    """
    present = [
        {k: v for k, v in message.items() if not (v is None or (k == "tool_calls" and v == []))}
        for message in messages
    ]
    return [each if "content" in each else {**each, "content": ""} for each in present]


def with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with all system and developer messages joined at the beginning."""
    instructions = [message for message in messages if is_system(message)]
    texts = ["\n".join(texts_of(message)) for message in instructions]
    joined = {**instructions[0], "role": "system", "content": "\n\n".join(texts)}
    return [joined, *(message for message in messages if not is_system(message))]


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message whose contents are plain (`with_plain_contents`)."""
    content = message.get("content", "")
    return [part["text"] for part in content] if isinstance(content, list) else [str(content)]


def is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def with_plain_contents(messages: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Return the messages with contents in the form that the template `source` reads.

    Contents may be strings or lists of parts: strings or `{"type": "text", "text": ...}`. A
    template that loops over the content gets `{"type": "text", ...}` parts; for others the parts
    are joined by newlines.

    Raises:
        ValueError: a part is not text.
    """
    walks = _WALKS_PARTS.search(source) is not None
    return [_plain(message, f"messages[{n}]", walks) for n, message in enumerate(messages)]


def _plain(message: dict[str, Any], place: str, walks: bool) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        return message
    texts = [_text(part, f"{place}['content'][{n}]") for n, part in enumerate(content)]
    parts = [{"type": "text", "text": text} for text in texts]
    return message | {"content": parts if walks else "\n".join(texts)}


def _text(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_KINDS and isinstance(part.get("text"), str):
        return part["text"]
    if isinstance(kind, str) and kind not in _TEXT_KINDS:
        raise ValueError(
            f"{place} is a part of the type {shown(kind)}, and jaxspec reads text alone: parts are "
            '{"type": "text", "text": ...}. Leave it out, or describe it in words.'
        )
    raise ValueError(
        f'{place} must be {{"type": "text", "text": ...}} or a text, got {shown(part)}. Parts of '
        "a content are texts."
    )
