"""Reader of tool calls as a list between tags, in JSON or as Python calls, parsed once complete.

LFM2 writes `<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>`, or JSON on request;
Nemotron Nano 2 writes `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`.
"""

import ast
import json
from collections.abc import Iterator
from typing import Any

from jaxspec.text.parsers import literals
from jaxspec.text.parsers.calls import Event, Tools, may_name
from jaxspec.text.parsers.json_reader import Status
from jaxspec.text.parsers.markers import Markers

_Call = tuple[str, dict[str, Any]]


class ListCalls:
    """Reader of a list of calls up to the tag `closing`; with `is_strict` names must be tools'.

    A list of more than `literals.MAX_CHARACTERS` is not parsed and counts as text.
    """

    def __init__(self, closing: str, tools: Tools, is_strict: bool) -> None:
        self.status = Status.READING
        self._tools, self._closing, self._is_strict = tools, closing, is_strict
        self._ends = Markers((closing,))
        self._held: list[str] = []
        self._num_held = 0
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def read(self, text: str, start: int, *, is_all: bool = False) -> int:
        place, tag = self._ends.find(text, start)
        end = min(place, start + literals.MAX_CHARACTERS + 1 - self._num_held)
        self._held.append(text[start:end])
        self._num_held += end - start
        if self._num_held > literals.MAX_CHARACTERS:
            self.status = Status.FAILED
        elif tag:
            end += len(tag)
            calls = _calls("".join(self._held))
            are_calls = calls and all(
                may_name(name, self._tools, self._is_strict) for name, _ in calls
            )
            self.status = Status.DONE if are_calls else Status.FAILED
            for name, arguments in calls if are_calls else ():
                text = json.dumps(arguments, ensure_ascii=False)
                self._events += [Event("name", name), Event("arguments", text), Event("end")]
        return end


def _calls(text: str) -> list[_Call]:
    """Parse the calls in a text; [] if it is anything else."""
    for read in (_json_calls, _python_calls):
        try:
            calls = list(read(text.strip()))
            literals.checked_json([arguments for _, arguments in calls])
            return calls
        except literals.ERRORS:
            continue
    return []


def _json_calls(text: str) -> Iterator[_Call]:
    value = json.loads(text, strict=False)
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("no call")
        arguments = call.get("arguments", call.get("parameters")) or {}
        if not isinstance(arguments, dict):
            raise ValueError("no arguments")
        yield call["name"], arguments


def _python_calls(text: str) -> Iterator[_Call]:
    tree = literals.parse(text)
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call")
        arguments = {}
        for keyword in call.keywords:
            name = keyword.arg and literals.argument_name(keyword.arg)
            if name is None or name in arguments:
                raise ValueError("no argument")
            arguments[name] = literals.literal(keyword.value)
        yield ast.unparse(call.func), arguments
