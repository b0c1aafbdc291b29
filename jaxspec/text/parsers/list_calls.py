"""Reader of tool calls as a list between tags, in JSON or as Python calls, parsed once complete.

LFM2 writes `<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>`, or JSON on request;
Nemotron Nano 2 writes `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`.
"""

import ast
import json
import warnings
from collections.abc import Iterator
from typing import Any

from jaxspec.text.parsers.calls import Event, Tools, may_name
from jaxspec.text.parsers.json_reader import Status
from jaxspec.text.parsers.markers import Markers

MAX_CHARACTERS = 2**18
"""Longest list of calls; a longer one is not parsed and counts as text."""
_JSON_NAMES = {"true": True, "false": False, "null": None}
_Call = tuple[str, dict[str, Any]]


class ListCalls:
    """Reader of a list of calls up to the tag `closing`; with `is_strict` names must be tools'."""

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
        end = min(place, start + MAX_CHARACTERS + 1 - self._num_held)
        self._held.append(text[start:end])
        self._num_held += end - start
        if self._num_held > MAX_CHARACTERS:
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
            json.dumps([arguments for _, arguments in calls], allow_nan=False, ensure_ascii=False)
            return calls
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return []


def _json_calls(text: str) -> Iterator[_Call]:
    value = json.loads(text)
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("no call")
        arguments = call.get("arguments", call.get("parameters")) or {}
        if not isinstance(arguments, dict):
            raise ValueError("no arguments")
        yield call["name"], arguments


def _python_calls(text: str) -> Iterator[_Call]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about invalid escapes
        tree = ast.parse(text, mode="eval").body
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call")
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise ValueError("no argument")
            arguments[keyword.arg] = _literal(keyword.value)
        yield ast.unparse(call.func), arguments


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python or JSON literal; ValueError for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(part) for part in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is no text")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_literal(node.operand)
    raise ValueError("no literal")
