"""The formats of quantised weights: how each is dequantised to float32, rows by rows.

Products of stored numbers and scales of up to 16 bits are exact in float32; others are rounded
once.
"""

import dataclasses
import functools
from typing import Protocol

import numpy as np

from jaxspec.checks import shown
from jaxspec.models.layers.weight_form import FACTORS, SCALES, VALUES, Grain
from jaxspec.models.quantised.tensors import (
    Matrix2D,
    PackedColumns,
    PackedRows,
    Rows,
    Tensor,
    unpacked,
)
from jaxspec.models.safetensors_file import QUANTISED
from jaxspec.weight import E2M1, FLOAT4_GROUP, INT4_GROUPS, INT4_ZERO, PACKED_UNIT, pack

_FLOAT32 = np.dtype(np.float32)
_E4M3 = np.arange(256, dtype=np.uint8).view(QUANTISED["F8_E4M3"]).astype(np.float32)
_E2M1 = np.array(E2M1, np.float32)
# A lookup of two numbers at once is one of 8 bytes.
_E2M1_PAIRS = (
    np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], 1)
    .view(np.float64)
    .reshape(256)
)


class Matrix(Protocol):
    """A weight as the folder stores it."""

    @property
    def label(self) -> str:
        """The format, for reports."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight in a 16-bit folder."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors with its values, its scales and other parts, in this order."""
        ...

    @property
    def grain(self) -> Grain | None:
        """The grain in which a model can hold the matrix; None if there is none."""
        ...

    def dequantise(self, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[rows, columns]` in float32, with rows from `first` on.

        Raises:
            ValueError: A scale is not finite.
        """
        ...

    def read_part(self, part: str, first: int, into: np.ndarray) -> None:
        """Fill `into`, `[rows, width]`, with rows of a part of `grain` from `first` on.

        Raises:
            ValueError: A scale is not finite.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Float8:
    """FP8 (E4M3) with a scale per tensor, per row or per block.

    `W[o, i] = weight[o, i] * scale[o // block[0], i // block[1]]`; the last blocks may be partial.
    In a stack of experts, `o` is the row of an expert's matrix, which has blocks of its own.
    """

    label: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    block: tuple[int, int]
    scale: np.ndarray | Matrix2D  # float32, a row per row of blocks; those of a row are not held
    has_whole_rows: bool  # True if blocks are declared to have all columns

    def dequantise(self, first: int, into: np.ndarray) -> None:
        count, width = into.shape
        values = Rows(self.tensors[0], width).rows(first, count)
        np.take(_E4M3, values.view(np.uint8), out=into, mode="clip")  # other modes copy
        _multiply(into, self._scale(first, count), self.block[1])

    @property
    def grain(self) -> Grain | None:
        """The grain in which a model can hold the matrix; None if its blocks are too small."""
        if not isinstance(self.scale, np.ndarray):
            return None
        if self.has_whole_rows:
            return Grain.ROWS
        units = zip(self.block, Grain.BLOCKS.unit, strict=True)
        return None if any(size % unit for size, unit in units) else Grain.BLOCKS

    def read_part(self, part: str, first: int, into: np.ndarray) -> None:
        count, width = into.shape
        assert part == SCALES, "values are read as they are stored"
        into[...] = self.scales.reshape(self.scales.size // width, width)[first : first + count]

    @functools.cached_property
    def scales(self) -> np.ndarray:
        """The scales of `grain`, float32, those of each expert of a stack."""
        assert isinstance(self.scale, np.ndarray) and self.grain is not None
        *stack, outer, inner = self.shape
        sizes = self.grain.scales((outer, inner))
        axes = zip(sizes, self.grain.unit, self.block, strict=False)
        picked = [np.arange(size) * unit // block for size, unit, block in axes]
        high, wide = (
            -(-size // block) for size, block in zip((outer, inner), self.block, strict=True)
        )
        grid = self.scale.reshape(*stack, high, wide)
        return grid[(..., *np.ix_(*picked))] if len(picked) == 2 else grid[..., picked[0], 0]

    def _scale(self, first: int, count: int) -> np.ndarray:
        if not isinstance(self.scale, np.ndarray):
            return _finite(self.scale.rows(first, count), self.tensors[1])
        expert, row = np.divmod(np.arange(first, first + count), self.shape[-2])
        blocks = -(-self.shape[-2] // self.block[0])
        return self.scale[expert * blocks + row // self.block[0]]


@dataclasses.dataclass(frozen=True)
class Float4:
    """FP4 (E2M1) with a scale per group of columns, and one for the tensor (NVFP4) or none (MXFP4).

    The low nibble of a byte is the first number. ModelOpt's NVFP4 multiplies by the tensor's
    scale, and compressed-tensors' divides by it.
    """

    label: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    scale: Matrix2D
    group: int
    rescale: np.ufunc
    by: np.float32

    def dequantise(self, first: int, into: np.ndarray) -> None:
        count, width = into.shape
        content = Rows(self.tensors[0], width // 2).rows(first, count)
        np.take(_E2M1_PAIRS, content, out=into.view(np.float64), mode="clip")
        _multiply(into, _finite(self.scale.rows(first, count), self.tensors[1]), self.group)
        self.rescale(into, self.by, out=into)

    @property
    def grain(self) -> Grain | None:
        has_groups = self.group == FLOAT4_GROUP and len(self.shape) == 2
        return Grain.FLOAT4 if has_groups and _are_packed(self.shape) else None

    def read_part(self, part: str, first: int, into: np.ndarray) -> None:
        if part == VALUES:
            content = Rows(self.tensors[0], self.shape[-1] // 2).rows(first, len(into))
            into[...] = pack(unpacked(content, 4))
        elif part == FACTORS:
            self.rescale(np.float32(1), self.by, out=into)
        else:
            scale = self.scale.rows(first, len(into))
            _finite(scale, self.tensors[1])
            into[...] = scale


@dataclasses.dataclass(frozen=True)
class Float4Columns:
    """Experts' matrices in MXFP4, dequantised to `[experts, inputs, outputs]` as in 16-bit folders.

    They are stored by outputs, with a scale per group of inputs.
    """

    label: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    numbers: PackedColumns
    scale: Matrix2D
    group: int
    grain: None = None

    def dequantise(self, first: int, into: np.ndarray) -> None:
        count = len(into)
        np.take(_E2M1, self.numbers.rows(first, count), out=into, mode="clip")
        begin, end = first // self.group, -(-(first + count) // self.group)
        scale = _finite(self.scale.rows(begin, end - begin), self.tensors[1])
        into *= scale[np.arange(first, first + count) // self.group - begin]

    def read_part(self, part: str, first: int, into: np.ndarray) -> None:
        raise ValueError(f"{self.label} of experts has no parts that a model can hold.")


@dataclasses.dataclass(frozen=True)
class Integers:
    """Integers of 4 or 8 bits with a scale, and a zero point, per group of columns.

    `W[o, i] = (number[o, i] - zero[o, g]) * scale[o, g]`, where g is `order[i]`, or `i // group`.
    """

    label: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    numbers: PackedRows | PackedColumns
    scale: Matrix2D
    zero: Matrix2D | int
    group: int
    order: np.ndarray | None

    def dequantise(self, first: int, into: np.ndarray) -> None:
        count = len(into)
        into[...] = self.numbers.rows(first, count)
        scale = _finite(self.scale.rows(first, count), self.tensors[1])
        if isinstance(self.zero, int):
            into -= np.float32(self.zero)
        else:
            self._by_group(np.subtract, into, self.zero.rows(first, count).astype(_FLOAT32))
        self._by_group(np.multiply, into, scale)

    @property
    def grain(self) -> Grain | None:
        sizes = [size for size in INT4_GROUPS if self.group % size == 0]
        if not sizes or self.order is not None or self.numbers.bits != 4:
            return None
        has_zeros = not isinstance(self.zero, int)
        if not _are_packed(self.shape) or not (has_zeros or self.zero == INT4_ZERO):
            return None
        return Grain.int4(sizes[0], has_zeros=has_zeros)

    def read_part(self, part: str, first: int, into: np.ndarray) -> None:
        count = len(into)
        if part == VALUES:
            into[...] = pack(self.numbers.rows(first, count))
            return
        if part == SCALES:
            of_groups = _finite(self.scale.rows(first, count), self.tensors[1])
        else:
            assert not isinstance(self.zero, int)
            of_groups = self.zero.rows(first, count)
        into[...] = np.repeat(of_groups, into.shape[1] // of_groups.shape[1], axis=1)

    def _by_group(self, operation: np.ufunc, into: np.ndarray, values: np.ndarray) -> None:
        if self.order is None:
            by_group(operation, into, values, self.group)
        else:
            operation(into, np.take(values, self.order, axis=1), out=into)


def _are_packed(shape: tuple[int, ...]) -> bool:
    """Return whether whole words have the numbers of 4 bits of each row (`pack`)."""
    return shape[-1] % PACKED_UNIT == 0


def _multiply(into: np.ndarray, scale: np.ndarray, group: int) -> None:
    by_group(np.multiply, into, scale, group)


def by_group(operation: np.ufunc, into: np.ndarray, values: np.ndarray, group: int) -> None:
    """Apply an operation with `values`, `[rows, groups]`; the last group may be partial."""
    count, width = into.shape
    whole = width // group
    parts = into[:, : whole * group].reshape(count, whole, group)
    operation(parts, values[:, :whole, None], out=parts)
    if width % group:
        rest = into[:, whole * group :]
        operation(rest, values[:, whole:], out=rest)


def _finite(scale: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return scales in float32.

    Raises:
        ValueError: One of them is not finite.
    """
    scale = scale.astype(_FLOAT32)
    if not np.isfinite(scale).all():
        wrong = scale[~np.isfinite(scale)][0]
        raise ValueError(
            f"{tensor.checkpoint.path}: the scales in {tensor.name} must be finite, got "
            f"{shown(float(wrong))}. {tensor.checkpoint.remedy}"
        )
    return scale
