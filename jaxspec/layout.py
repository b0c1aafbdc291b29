"""PackedLayout: named fields end to end in one int32 array, as host and device exchange them.

No JAX here: the methods take NumPy arrays, JAX arrays and tracers alike.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

_INT32 = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Field:
    """One named part of a packed array."""

    name: str
    meaning: str
    _: dataclasses.KW_ONLY
    dtype: type[np.int32] | type[np.float32] = np.int32  # float32 is kept by its bits
    shape: tuple[int | str, ...] = ()  # "drafts" stands for K, "emits" for 1 + K


class PackedLayout:
    """Named fields laid end to end along the last axis of one int32 array."""

    def __init__(self, fields: Iterable[Field], num_drafts: int = 0):
        """Lay out `fields` in the order given, for `num_drafts` drafts a row."""
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
        """The field `name` of `array [..., size]`, a view of shape `[..., *shape]`."""
        bits = array[..., self.slices[name]].reshape((*array.shape[:-1], *self.shapes[name]))
        return _as_dtype(bits, self._dtypes[name])

    def unpack(self, array: Any) -> dict[str, Any]:
        """Every field of `array [..., size]` by name, as `read` gives it."""
        return {name: self.read(array, name) for name in self.fields}

    def bits(self, name: str, value: Any) -> Any:
        """`value [..., *shape]` of the field `name` as it is packed, int32 `[..., width]`.

        Raises:
            KeyError: there is no such field.
            ValueError: `value` has another dtype or another shape than the field.
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
