"""PackedLayout: named fields packed into one int32 array, for transfers between host and device.

Imports no JAX: the methods accept NumPy arrays, JAX arrays and tracers.

    fields  a: []   b: ["drafts"]   c: [2], float32      with 3 drafts per row
    array   [a, b0, b1, b2, c0, c1]                      int32; c has the bits of its float32 values
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

_INT32 = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Field:
    """Named part of a packed array."""

    name: str
    meaning: str
    _: dataclasses.KW_ONLY
    dtype: type[np.int32] | type[np.float32] = np.int32  # float32 values are stored by their bits
    shape: tuple[int | str, ...] = ()  # "drafts" means K (num_drafts), "emits" 1 + K


class PackedLayout:
    """Layout of named fields along the last axis of an int32 array.

    Attributes:
        fields: The fields by name, in order.
        shapes: Their shapes by name, with numbers in place of "drafts" and "emits".
        slices: Their slices of the last axis, by name.
        size: Length of the last axis.
    """

    def __init__(self, fields: Iterable[Field], num_drafts: int = 0):
        """Pack `fields` in the given order, for `num_drafts` drafts per row."""
        sizes = {"drafts": num_drafts, "emits": 1 + num_drafts}
        self.fields = {field.name: field for field in fields}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(sizes[n] if isinstance(n, str) else n for n in field.shape)
            for name, field in self.fields.items()
        }
        self._dtypes = {name: np.dtype(field.dtype) for name, field in self.fields.items()}
        self.slices: dict[str, slice] = {}
        start = 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(start, start + math.prod(shape))
            start += math.prod(shape)
        self.size = start

    def read(self, array: Any, name: str) -> Any:
        """Return the field `name` of `array [..., size]`, with shape `[..., *shape]`."""
        bits = array[..., self.slices[name]].reshape((*array.shape[:-1], *self.shapes[name]))
        return _as_dtype(bits, self._dtypes[name])

    def unpack(self, array: Any) -> dict[str, Any]:
        """Return every field of `array [..., size]` by name, as in `read`."""
        return {name: self.read(array, name) for name in self.fields}

    def bits(self, name: str, value: Any) -> Any:
        """Return `value [..., *shape]` of the field `name` as packed: int32 `[..., width]`.

        Raises:
            KeyError: there is no such field.
            ValueError: `value` differs in dtype or shape from the field.
        """
        dtype, shape = self._dtypes[name], self.shapes[name]
        lead = value.shape[: value.ndim - len(shape)]
        if value.dtype != dtype or value.shape != (*lead, *shape):
            raise ValueError(
                f"The field {name} must be {dtype} [..., {list(shape)}], got "
                f"{value.dtype} {list(value.shape)}. Give one value for each row."
            )
        return _as_dtype(value, _INT32).reshape((*lead, math.prod(shape)))


def _as_dtype(array: Any, dtype: np.dtype) -> Any:
    return array if array.dtype == dtype else array.view(dtype)
