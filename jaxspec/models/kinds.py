"""Kinds of values in a config.json, and `Block`: a JSON object that is read by kind alone."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from jaxspec.checks import shown
from jaxspec.request import ROW_STOP_IDS

_Value = TypeVar("_Value")

MAX_LAYERS = 1000
"""Layers that a config.json may ask for; the deepest published models have some 130."""


@dataclasses.dataclass(frozen=True)
class Kind(Generic[_Value]):
    """What an entry may be: in words, and as a test. A boolean is never a number."""

    words: str  # behind "must be"
    holds: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind[int]:
    """Integers from `least` to `most`; 4.0 is none."""
    words = f"an integer from {least:,} to {most:,}"
    return Kind(words, lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float) -> Kind[float]:
    """Numbers from `least` to `most`, with or without a decimal point."""
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
    """Lists of at most `most` strings."""
    return Kind(
        f"a list of at most {most:,} strings",
        lambda value: (
            isinstance(value, list)
            and len(value) <= most
            and all(isinstance(word, str) for word in value)
        ),
    )


# Far beyond what is published, and small enough that no sum of products overflows.
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
    """The entries of a JSON object; each that is read must be of the kind that its reader names.

    An entry of null is as if absent.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        *,
        file: str = "config.json",
        prefix: str = "",
        remedy: str | None = None,
    ):
        """`file` and `prefix` say in errors where the entries stand, such as `rope_parameters.`.

        `remedy`: the sentence that names the way out; None: to take the published file.
        """
        self.entries = entries
        self.file, self.prefix = file, prefix
        self.remedy = remedy or f"Take the {file} that was published with the weights."

    def find(self, name: str, kind: Kind[_Value]) -> _Value | None:
        """The entry; None where there is none.

        Raises:
            ValueError: it is of another kind.
        """
        value = self.entries.get(name)
        if value is None or kind.holds(value):
            return value
        raise ValueError(
            f"{self.file}: `{self.prefix}{name}` must be {kind.words}, got {shown(value)}. "
            f"{self.remedy}"
        )

    def need(self, name: str, kind: Kind[_Value]) -> _Value:
        """The entry.

        Raises:
            ValueError: there is none, or it is of another kind.
        """
        value = self.find(name, kind)
        if value is None:
            raise ValueError(
                f"{self.file} must give `{self.prefix}{name}`, and does not. {self.remedy}"
            )
        return value

    def need_either(self, names: tuple[str, str], kind: Kind[_Value]) -> _Value:
        """The entry of a field that has two names; the first is the usual one.

        Raises:
            ValueError: there is none, it is of another kind, or there are two that differ.
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
        """The object under `name`; an empty one where there is none.

        Raises:
            ValueError: it is no object.
        """
        entries = self.find(name, OBJECT) or {}
        return Block(entries, file=self.file, prefix=f"{self.prefix}{name}.", remedy=self.remedy)

    def refuse_all_but(self, expected: Mapping[str, tuple[Any, ...]]) -> None:
        """ValueError for an option that changes the output and has none of the `expected` values.

        An absent option is as the family's code assumes.
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
