"""ChatTemplate: renders conversations with a checkpoint's chat templates."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checks import boolean, items, shown, text
from jaxspec.text.chat_boundaries import follow_ups
from jaxspec.text.conversations import (
    is_system,
    texts_of,
    with_one_system_message,
    with_plain_contents,
    without_nulls,
)
from jaxspec.text.template_process import (
    MAX_CHARACTERS,
    Rendered,
    TemplateFailure,
    TemplateProcesses,
)
from jaxspec.text.tokenizer_files import MAX_TEMPLATE_BYTES, OWN_FILE, read_sources, too_long

_MAX_ENTRIES = 100_000  # most messages or tools of a conversation
_MAX_DEPTH = 64  # nesting of lists and dicts
_CONTAINER = 32  # characters counted for each list or dict, besides its contents
_MAX_INTEGER_BITS = 1024
_ARGUMENTS = ("messages", "tools", "add_generation_prompt")  # not allowed as template switches
_TOOL_SWITCHES = frozenset({"strict", "cache_control", "defer_loading"})
_MARK = "\N{WORD JOINER}[the message goes on here]\N{WORD JOINER}"  # not in any real message


class ChatTemplate:
    """Chat templates of a checkpoint folder, by name. Rendering is thread-safe."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], special_tokens: dict[str, str]):
        """Read the templates.

        Args:
            folder: Folder of the checkpoint, or a GGUF file.
            settings: Contents of tokenizer_config.json.
            special_tokens: Tokens such as bos_token by name, passed to templates as variables.

        Raises:
            ValueError: a template has the wrong type or is too long.
        """
        self._folder, self._special_tokens = folder, special_tokens
        self._sources = read_sources(folder, settings)
        self._processes = TemplateProcesses()

    @property
    def source(self) -> str | None:
        """Source of the template for chats with tools; None if the checkpoint has no template."""
        return self._sources.get("tool_use", self._sources.get("default"))

    def render(
        self,
        messages: Any,
        tools: Any,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        *,
        template: str | None = None,
        continue_final_message: bool = False,
        tries_turns: bool = False,
    ) -> Rendered:
        """Render a conversation made of JSON values.

        Args:
            messages: The messages.
            tools: Tool definitions, or None.
            add_generation_prompt: End the text with the beginning of an answer.
            options: Switches of the template, such as `enable_thinking`.
            template: Source of another template, or the name of one of the checkpoint.
            continue_final_message: End the text with the content of the last message.
            tries_turns: Measure how much of the text stays the same with each of `follow_ups`.

        Raises:
            ValueError: there is no template, a value is not a JSON value, the template fails, or
                the last message can't be continued.
        """
        conversation = {
            "messages": _mappings("messages", messages, "role and content"),
            "tools": None if tools is None else _mappings("tools", tools, "type and function"),
            "documents": None,
            "add_generation_prompt": boolean("add_generation_prompt", add_generation_prompt),
        }
        variables = _Copy().of_each(conversation | _switches(options))
        if variables["tools"]:
            variables["tools"] = [_described(tool) for tool in variables["tools"]]
        source = self._source(template, has_tools=bool(variables["tools"]))
        messages = without_nulls(variables["messages"])
        messages = list(map(_alias_reasoning, with_plain_contents(messages, source)))
        if continue_final_message:
            messages = _marked(messages, add_generation_prompt)
        variables = self._special_tokens | variables
        found = self._run_any(source, variables, messages, tries_turns)
        if not continue_final_message:
            return found
        text = _before_mark(found.text)
        return Rendered(text, tuple(min(kept, len(text)) for kept in found.num_kept))

    def _run_any(
        self, source: str, variables: dict[str, Any], messages: list[Any], tries_turns: bool
    ) -> Rendered:
        """Run the template; if it refuses or omits a system message, join those at the beginning.

        Agents send several, or call them developer messages, and many templates take one.
        """

        def run(messages: list[Any]) -> Rendered:
            has_tools = bool(variables["tools"])
            turns = follow_ups(messages, has_tools=has_tools) if tries_turns else []
            return self._run(source, variables | {"messages": messages}, turns)

        instructions = [message for message in messages if is_system(message)]
        is_one = len(instructions) == 1 and messages[0].get("role") == "system"
        is_marked = messages and any(_MARK in text for text in texts_of(messages[-1]))
        if not instructions or is_one or (is_marked and is_system(messages[-1])):
            return run(messages)
        try:
            found = run(messages)
        except ValueError:
            return run(with_one_system_message(messages))
        if all(text.strip() in found.text for each in instructions for text in texts_of(each)):
            return found
        return run(with_one_system_message(messages))

    def _source(self, template: Any, *, has_tools: bool) -> str:
        if template is not None:
            name = text("chat_template", template)
            source = self._sources.get(name, name)
            if len(source) > MAX_TEMPLATE_BYTES:
                raise ValueError(too_long("chat_template"))
            return source
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(
                f"A chat needs a chat template, but {self._folder.name} has none ({OWN_FILE}, or "
                "chat_template in tokenizer_config.json or a GGUF file's metadata). Pass "
                "chat_template, or use generate() with the text itself."
            )
        return self._sources[name]

    def _run(self, source: str, variables: dict[str, Any], turns: list[Any]) -> Rendered:
        try:
            return self._processes.render(source, variables, turns)
        except TemplateFailure as failure:
            raise ValueError(
                f"The chat template of {self._folder.name} must accept the conversation, but "
                f"{failure}. Check roles, their order and contents against the template, or use "
                "generate() with the text itself."
            ) from failure


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without nulls and without switches of servers, which models need not read."""
    described = {k: v for k, v in tool.items() if v is not None and k not in _TOOL_SWITCHES}
    if isinstance(function := described.get("function"), dict):
        described["function"] = _described(function)
    return described


def _switches(options: Any) -> dict[str, Any]:
    """Validate the switches of a template, which must not be arguments of `render`."""
    if not isinstance(options, Mapping):
        raise ValueError(
            f"chat_template_kwargs must be a dict of the template's own switches, got "
            f"{shown(options)}. Write it as in {{'enable_thinking': False}}."
        )
    if taken := [name for name in _ARGUMENTS if name in options]:
        raise ValueError(
            f"chat_template_kwargs must not hold {taken[0]!r}, which is an argument of its own; "
            f"got {shown(options)}. Pass it there."
        )
    return dict(options)


def _marked(messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[dict[str, Any]]:
    """Return the messages with `_MARK` and a space appended to the content of the last one."""
    if add_generation_prompt:
        raise ValueError(
            "continue_final_message=True continues the last message, and "
            "add_generation_prompt=True, the default, begins another one. Pass "
            "add_generation_prompt=False with it."
        )
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str) and content:
        return [*messages[:-1], last | {"content": content + _MARK + " "}]
    if isinstance(content, list) and content:
        end = {"type": "text", "text": content[-1]["text"] + _MARK + " "}
        return [*messages[:-1], last | {"content": [*content[:-1], end]}]
    raise ValueError(
        "continue_final_message=True needs a last message with a text to continue, got "
        f"{shown(last)}. Give it a content."
    )


def _before_mark(text: str) -> str:
    """Return the text before the mark, trimmed if the template trims contents."""
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ValueError(
            "continue_final_message=True needs a chat template that writes the last message's "
            "content out, and this one does not. Use generate() with the text itself."
        )
    return before if after.startswith(" ") else before.rstrip()


def _mappings(name: str, values: Any, keys: str) -> list[Any]:
    found = items(values, _MAX_ENTRIES)
    if found is None or not all(isinstance(value, Mapping) for value in found):
        example = '[{"role": "user", "content": "Hi"}]' if name == "messages" else "[{...}]"
        raise ValueError(
            f"Each of {name} must be a mapping with {keys}, got {shown(values)}. Pass a list such "
            f"as {example}."
        )
    if len(found) > _MAX_ENTRIES:
        raise ValueError(f"A chat may have at most {_MAX_ENTRIES:,} {name}, got more.")
    return found


class _Copy:
    """Copies a conversation as JSON values, within limits of size and depth."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS

    def of_each(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._of(value, (name,)) for name, value in variables.items()}

    def _of(self, value: Any, place: tuple[Any, ...]) -> Any:
        if isinstance(value, np.generic):
            value = value.tolist()
        if isinstance(value, Mapping | list | tuple):
            self._count(_CONTAINER)
            if len(place) > _MAX_DEPTH:
                raise ValueError(
                    f"A conversation may have lists and dicts {_MAX_DEPTH} deep in each other, "
                    f"and {_written(place)} has more. Give it as text."
                )
            if isinstance(value, Mapping):
                return {
                    self._key(key, place): self._of(part, (*place, key))
                    for key, part in value.items()
                }
            return [self._of(part, (*place, index)) for index, part in enumerate(value)]
        if isinstance(value, str):
            self._count(len(value))
        elif not (
            value is None
            or (isinstance(value, float) and math.isfinite(value))
            or (isinstance(value, int) and value.bit_length() <= _MAX_INTEGER_BITS)
        ):
            raise ValueError(
                f"Messages, tools and template options must be JSON's values (None, True, False, "
                f"finite numbers, texts, lists and dicts), and {_written(place)} is "
                f"{shown(value)}. Give it as text."
            )
        return value

    def _key(self, key: Any, place: tuple[Any, ...]) -> str:
        if not isinstance(key, str):
            raise ValueError(
                f"The keys of messages, tools and template options must be texts, and "
                f"{_written(place)} has {shown(key)}. Write it as a text."
            )
        self._count(len(key))
        return key

    def _count(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise ValueError(
                f"A conversation may have {MAX_CHARACTERS:,} characters, of which each list and "
                f"dict counts as {_CONTAINER}; this one has more. Shorten it."
            )


def _written(place: tuple[Any, ...]) -> str:
    """Return the Python expression for a place, such as "messages[0]['content']"."""
    name, *steps = place
    return name + "".join(f"[{shown(step, 24)}]" for step in steps[:4]) + "..." * (len(steps) > 4)


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy the reasoning of a message to the other names under which templates read it."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if message.get(name) is not None:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message
