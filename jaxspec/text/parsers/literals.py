"""Python expressions in texts of models, with JSON's names and with line ends in strings."""

import ast
import json
import keyword
import re
import warnings
from typing import Any

MAX_CHARACTERS = 2**18
"""Longest text that is parsed as Python."""
ERRORS = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
"""Raised for text that is not an expression, or not a literal."""
_JSON_NAMES = {"true": True, "false": False, "null": None}
_RENAMED = "jaxspec_argument_"
# Unterminated strings end with the text, so that each character is read once.
_TOKEN = re.compile(
    r"""(?P<quotes>'{3}|"{3}) (?:\\.|[^\\])*? (?:(?P=quotes)|\Z)
    | (?P<string>' (?:\\.|[^'\\])*+ (?:'|\Z) | " (?:\\.|[^"\\])*+ (?:"|\Z))
    | (?<=[(,\s]) (?P<name>[\w-]+) (?=\s*=(?!=))""",
    re.DOTALL | re.VERBOSE,
)
_IN_STRING = re.compile(r"\\.|[\r\n]", re.DOTALL)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\\\n": r"\\\n", "\\\r": r"\\\r"}


def parse(text: str) -> ast.expr:
    """Parse an expression; strings may have line ends, and keyword arguments any name.

    `argument_name` restores the names. Raises one of `ERRORS`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about invalid escapes
        return ast.parse(_TOKEN.sub(_as_python, text), mode="eval").body


def argument_name(name: str) -> str:
    """Return the name of an argument in the text that was parsed."""
    if not name.startswith(_RENAMED):
        return name
    return bytes.fromhex(name.removeprefix(_RENAMED)).decode()


def literal(node: ast.expr) -> Any:
    """Return the value of a Python or JSON literal; ValueError for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(part) for part in node.elts]
    if isinstance(node, ast.Dict):
        keys = [literal(key) if key else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is no text")
        return dict(zip(keys, map(literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -literal(node.operand)
    raise ValueError("no literal")


def as_json(text: str) -> str | None:
    """Return a Python list or dict as JSON, or None if the text is no such literal."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return checked_json(literal(parse(text)))
    except ERRORS:
        return None


def checked_json(value: Any) -> str:
    """Return a value as JSON that UTF-8 can encode; raises one of `ERRORS`."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()  # escapes may be half of a surrogate pair
    return text


def _as_python(token: re.Match[str]) -> str:
    if name := token["name"]:
        is_usable = name.isidentifier() and not keyword.iskeyword(name)
        return name if is_usable else f"{_RENAMED}{name.encode().hex()}"
    if string := token["string"]:
        # A backslash before a line end is a character of the value, not Python's continuation.
        return _IN_STRING.sub(lambda part: _ESCAPES.get(part.group(), part.group()), string)
    return token.group()
