"""Kinds of values in a config.json, and `Block`: a JSON object whose entries are read by kind."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from jaxspec.checks import shown
from jaxspec.requests.request import ROW_STOP_IDS

_Value = TypeVar("_Value")

MAX_LAYERS = 1000
"""Maximum number of layers; the deepest published models have about 130."""


@dataclasses.dataclass(frozen=True)
class Kind(Generic[_Value]):
    """A set of allowed values: a description for errors, and a test. Booleans are not numbers."""

    words: str  # completes "must be ..."
    holds: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind[int]:
    """Integers from `least` to `most`; floats such as 4.0 are not accepted."""
    words = f"an integer from {least:,} to {most:,}"
    return Kind(words, lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float) -> Kind[float]:
    """Integers and floats from `least` to `most`."""
    words = f"a number from {least:g} to {most:g}"
    return Kind(words, lambda value: type(value) in (int, float) and least <= value <= most)


def numbers(most: int, each: Kind[int]) -> Kind[list[int]]:
    """Lists of at most `most` integers of one kind."""
    return Kind(
        f"a list of at most {most:,}, each {each.words}",
        lambda value: (
            isinstance(value, list) and len(value) <= most and all(map(each.holds, value))
        ),
    )


def words(most: int) -> Kind[list[str]]:
    return Kind(
        f"a list of at most {most:,} strings",
        lambda value: (
            isinstance(value, list)
            and len(value) <= most
            and all(isinstance(word, str) for word in value)
        ),
    )


# Far above published sizes, and small enough that no size computation overflows.
SIZE = whole(1, 2**20)
FLAG: Kind[bool] = Kind("true or false", lambda value: isinstance(value, bool))
WORD: Kind[str] = Kind("a string", lambda value: isinstance(value, str))
OBJECT: Kind[Mapping[str, Any]] = Kind("an object", lambda value: isinstance(value, Mapping))
_TOKEN_ID = whole(0, 2**31 - 1)
TOKEN_IDS: Kind[int | list[int]] = Kind(
    f"a token id or a list of at most {ROW_STOP_IDS}, each {_TOKEN_ID.words}",
    lambda value: (
        _TOKEN_ID.holds(value)
        or (
            isinstance(value, list)
            and len(value) <= ROW_STOP_IDS
            and all(map(_TOKEN_ID.holds, value))
        )
    ),
)


class Block:
    """The entries of a JSON object, read with the kind that each must have.

    A null entry counts as missing.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        *,
        file: str = "config.json",
        prefix: str = "",
        remedy: str | None = None,
    ):
        """Wrap `entries`.

        Args:
            entries: The JSON object.
            file: File name for error messages.
            prefix: Path of the object in the file, such as `rope_parameters.`, for error messages.
            remedy: Sentence for error messages; None means to take the published file.
        """
        self.entries = entries
        self.file, self.prefix = file, prefix
        self.sizes: dict[str, int] = {}  # the integers that were read, for errors
        self.remedy = remedy or f"Take the {file} that was published with the weights."

    def find(self, name: str, kind: Kind[_Value]) -> _Value | None:
        """Return the entry, or None if it is missing.

        Raises:
            ValueError: It has another kind.
        """
        value = self.entries.get(name)
        if value is None or kind.holds(value):
            self._note(name, value)
            return value
        raise ValueError(
            f"{self.file}: `{self.prefix}{name}` must be {kind.words}, got {shown(value)}. "
            f"{self.remedy}"
        )

    def _note(self, name: str, value: Any) -> None:
        if type(value) is int:
            self.sizes[name] = value

    def need(self, name: str, kind: Kind[_Value]) -> _Value:
        """Return the entry.

        Raises:
            ValueError: It is missing or has another kind.
        """
        value = self.find(name, kind)
        if value is None:
            raise ValueError(
                f"{self.file} must give `{self.prefix}{name}`, and does not. {self.remedy}"
            )
        return value

    def need_either(self, names: tuple[str, str], kind: Kind[_Value]) -> _Value:
        """Return the entry of a field with two names, the usual one first.

        Raises:
            ValueError: It is missing, has another kind, or the two names have different values.
        """
        usual, other = names
        value = self.find(other, kind)
        if value is None:
            return self.need(usual, kind)
        if self.find(usual, kind) not in (None, value):
            raise ValueError(
                f"{self.file}: `{usual}` and `{other}` mean the same, and differ: "
                f"{shown(self.entries[usual])} and {shown(value)}. {self.remedy}"
            )
        return value

    def block(self, name: str) -> "Block":
        """Return the object under `name`; an empty one if it is missing.

        Raises:
            ValueError: The entry is not an object.
        """
        entries = self.find(name, OBJECT) or {}
        return Block(entries, file=self.file, prefix=f"{self.prefix}{name}.", remedy=self.remedy)

    def refuse_all_but(self, expected: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise ValueError for options that change the output and have an unexpected value.

        Args:
            expected: Maps option names to their implemented values; a missing option is fine, too.
        """
        for name, accepted in expected.items():
            value = self.entries.get(name)
            if value is None or any(type(value) is type(a) and value == a for a in accepted):
                continue
            wanted = " or ".join(map(repr, accepted)) or "absent"
            raise ValueError(
                f"{self.file}: `{self.prefix}{name}` must be {wanted}, got {shown(value)}, which "
                "jaxspec does not implement; without it the output would be wrong. Use a "
                "checkpoint that does not need it."
            )
