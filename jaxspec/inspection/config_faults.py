"""Collection of all faults of a config.json, where loading stops at the first."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import Block, Kind
from jaxspec.models.quantised.scheme import FIELD, Scheme

_Value = TypeVar("_Value")

# Every kind that a family reads accepts one of these. 64 is divisible by many head counts.
_STAND_INS: tuple[Any, ...] = (64, 1, 10.0, 1e-6, False, "", [], {})


def parse(family: type[Model], fields: Fields) -> tuple[ModelConfig | None, list[str]]:
    """Parse a config.json; return the config, or None and the loader's message for each fault.

    The first message is the one that loading raises. Rules of a family that involve several fields
    are checked only if every field has the right kind: a placeholder value could break such a rule.
    """
    try:
        return family.parse_config(fields), []
    except ValueError as error:
        notes = _Notes([str(error)])
    try:
        family.parse_config(_NotingFields(fields, notes))
    except ValueError as error:
        if not notes.fields:
            notes.add(error)
    except ArithmeticError:  # caused by a placeholder value
        pass
    return None, notes.faults


@dataclasses.dataclass
class _Notes:
    """Faults found so far in all blocks of a config.json."""

    faults: list[str]
    fields: set[str] = dataclasses.field(default_factory=set)  # names with a placeholder value

    def add(self, error: ValueError) -> None:
        if str(error) not in self.faults:
            self.faults.append(str(error))


class _NotingBlock(Block):
    """Block that records faulty entries and continues with a placeholder value."""

    def __init__(self, block: Block, notes: _Notes):
        vars(self).update(vars(block), plain=Block(block.entries, file=block.file), notes=notes)
        self.plain.prefix = block.prefix

    plain: Block
    notes: _Notes

    def find(self, name: str, kind: Kind[_Value]) -> _Value | None:
        """Return the entry, or None if it is absent or faulty."""
        return self._noted(name, lambda: self.plain.find(name, kind), None)

    def need(self, name: str, kind: Kind[_Value]) -> _Value:
        """Return the entry, or a placeholder."""
        return self._noted(name, lambda: self.plain.need(name, kind), _stand_in(kind))

    def need_either(self, names: tuple[str, str], kind: Kind[_Value]) -> _Value:
        """Return the entry under one of two names, or a placeholder."""
        return self._noted(names[0], lambda: self.plain.need_either(names, kind), _stand_in(kind))

    def block(self, name: str) -> Block:
        """Return the object under `name`, which shares this block's notes."""
        block = self._noted(name, lambda: self.plain.block(name), Block({}))
        return _NotingBlock(block, self.notes)

    def refuse_all_but(self, expected: Mapping[str, tuple[Any, ...]]) -> None:
        """Check each option separately, to record all faults."""
        for name, accepted in expected.items():
            try:
                self.plain.refuse_all_but({name: accepted})
            except ValueError as error:
                self.notes.add(error)

    def _noted(self, name: str, read: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return read()
        except ValueError as error:
            if name not in self.notes.fields:  # else a faulty entry was read as absent
                self.notes.add(error)
            self.notes.fields.add(name)
            return otherwise


def _stand_in(kind: Kind[_Value]) -> _Value:
    return next(value for value in _STAND_INS if kind.holds(value))


class _NotingFields(_NotingBlock, Fields):
    """Fields of a config.json that record faulty entries."""

    def scheme(self) -> Scheme | None:
        """Return the formats of quantised weights; None without them, or if they are refused."""
        return self._noted(FIELD, super().scheme, None)
