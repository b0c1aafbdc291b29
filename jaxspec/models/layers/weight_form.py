"""Forms of published weights: the parameters of a matrix, and the weight that ops take."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.layers.parameters import Init
from jaxspec.weight import (
    FLOAT4_GROUP,
    INT4_ZERO,
    PACKED,
    PACKED_UNIT,
    PUBLISHED_BLOCK,
    SCALED_COLUMNS,
    Float4Groups,
    Float8BlockExperts,
    Float8Blocks,
    Float8RowExperts,
    Float8Rows,
    Int4Groups,
    Published,
    Published8Bit,
    Published8BitExperts,
)

VALUES, SCALES, ZEROS, FACTORS = "values", "scales", "zeros", "factors"
"""Names of the parameters of a published matrix. A checkpoint has them after the tensor's name."""

_FLOAT8, _FLOAT32 = np.dtype(jnp.float8_e4m3fn), np.dtype(np.float32)
_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)
_DRAWN_SCALE = 2.0**-12  # of random weights: 0.02 is stored as 80, and e4m3 ends at 448
# Stored numbers of 4 bits are drawn from 1 to 15: integers less 8 then have the mean 0, and so have
# numbers in FP4. The standard deviation is about 0.02.
_DRAWN_INT4, _DRAWN_FLOAT4 = 2.0**-8, 2.0**-7


class Part(NamedTuple):
    """A parameter of a published matrix.

    In a checkpoint it is `[columns, rows]`, or `[columns]`, in units of the matrix.
    """

    name: str
    field: str  # of the weight's type
    dtype: np.dtype
    unit: tuple[int, ...]  # columns, and rows, of the matrix that are stored together
    drawn: float | None = None  # of random weights; None means random ones, or those of `init`
    elements: int = 1  # stored for the rows of a unit
    transpose: bool = False  # the parameter is `[rows, columns]`
    is_scaled: bool = False  # by the factor of a placement

    def shape(self, columns: int, rows: int) -> tuple[int, ...]:
        """Return its shape in a checkpoint for a tensor `[columns, rows]`."""
        units = zip((columns, rows), self.unit, strict=False)
        first, *others = (-(-size // unit) for size, unit in units)
        return (first, *(count * self.elements for count in others))

    def abstract(self, columns: int, rows: int) -> jax.Array:
        shape = self.shape(columns, rows)
        return jnp.zeros(shape[::-1] if self.transpose else shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Grain:
    """The values of a published matrix that share a scale, and the parts in which it is stored."""

    BLOCKS: ClassVar["Grain"]
    ROWS: ClassVar["Grain"]
    FLOAT4: ClassVar["Grain"]

    kind: type[Published]
    parts: tuple[Part, ...]
    experts: type[Published8BitExperts] | None = None  # of stacks; None if there are none

    @staticmethod
    def int4(group: int, *, has_zeros: bool) -> "Grain":
        """Return the grain of integers with a scale per `group` of rows, and zero points or not."""
        unit = (1, group)
        scales = Part(SCALES, "scale", _FLOAT32, unit, _DRAWN_INT4, transpose=True, is_scaled=True)
        zeros = Part(ZEROS, "zero", _UINT8, unit, INT4_ZERO, transpose=True)
        return Grain(Int4Groups, (_PACKED, scales, *([zeros] if has_zeros else [])))

    @property
    def has_terms(self) -> bool:
        """True if activations are e4m3 numbers, one or the sum of two."""
        return issubclass(self.kind, Published8Bit)

    @property
    def unit(self) -> tuple[int, ...]:
        """Columns, and rows, of the matrix with one scale."""
        return self.part(SCALES).unit

    @property
    def bits(self) -> int:
        """Bits of a number, without scales: 8 or 4."""
        values = self.part(VALUES)
        return 8 * values.dtype.itemsize * values.elements // values.unit[1]

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor `[columns, rows]`."""
        columns, rows = shape
        return self.part(SCALES).shape(columns, rows)


def _float8(*unit: int) -> tuple[Part, ...]:
    return (
        Part(VALUES, "array", _FLOAT8, (1, 1)),
        Part(SCALES, "scale", _FLOAT32, unit, _DRAWN_SCALE, is_scaled=True),
    )


_PACKED = Part(VALUES, "array", _UINT16, (1, PACKED_UNIT), elements=PACKED)
Grain.BLOCKS = Grain(Float8Blocks, _float8(SCALED_COLUMNS, PUBLISHED_BLOCK), Float8BlockExperts)
Grain.ROWS = Grain(Float8Rows, _float8(1), Float8RowExperts)
Grain.FLOAT4 = Grain(
    Float4Groups,
    (
        _PACKED,
        Part(SCALES, "scale", _FLOAT8, (1, FLOAT4_GROUP), 1.0, transpose=True),
        Part(FACTORS, "factor", _FLOAT32, (1,), _DRAWN_FLOAT4, is_scaled=True),
    ),
)


class Form(NamedTuple):
    """How a published matrix is stored and multiplied."""

    grain: Grain
    terms: int = 2  # of each activation, as in `Float8Blocks`; of weights in 8 bits alone

    def weight(self, arrays: Mapping[str, Any]) -> Published:
        """Return the matrix as ops take it, of arrays by names of parts."""
        fields = {part.field: arrays[part.name] for part in self.grain.parts}
        if self.grain.has_terms:
            fields["terms"] = self.terms
        kind: Callable[..., Published] = self.grain.kind
        return kind(**fields)

    def abstract(self, inner: int, columns: int) -> Published:
        """Return a matrix in this form, without values, as ops take it."""

        def declared() -> Published:
            parts = self.grain.parts
            return self.weight({part.name: part.abstract(columns, inner) for part in parts})

        return jax.eval_shape(declared)

    def experts(self, values: jax.Array, scales: jax.Array) -> Published8BitExperts:
        """Return a stack of matrices as ops take it."""
        assert self.grain.experts is not None
        return self.grain.experts(values, scales, terms=self.terms)

    def abstract_experts(self, number: int, outer: int, inner: int) -> Published8BitExperts:
        """Return a stack of matrices in this form, without values, with whole blocks of features.

        Padding has no influence.
        """
        inner += -inner % PUBLISHED_BLOCK
        scales = number, *self.grain.scales((outer, inner))

        def declared() -> Published8BitExperts:
            values = jnp.zeros((number, outer, inner), _FLOAT8)
            return self.experts(values, jnp.zeros(scales, _FLOAT32))

        return jax.eval_shape(declared)


def drawn(part: Part, init: Init) -> Init:
    """Return what draws a part of a random matrix `[inner, outer]`, or of a stack of experts'.

    Args:
        part: The part.
        init: What draws the numbers in the dtype of the model.
    """
    if part.drawn is not None:
        return _Constant(part.drawn)
    return _draw_packed if part.dtype == _UINT16 else _DrawnValues(init)


@dataclasses.dataclass(frozen=True)  # unlike a tuple, `jax.jit` takes it
class _Constant:
    value: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


@dataclasses.dataclass(frozen=True)
class _DrawnValues:
    """Draws values in FP8; stacks are not transposed."""

    init: Init

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        if len(shape) == 3:
            numbers = self.init(key, shape, _FLOAT32)
        else:
            numbers = self.init(key, shape[::-1], _FLOAT32).T
        return (numbers / _DRAWN_SCALE).astype(dtype)


def _draw_packed(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    numbers = jax.random.randint(key, (4, *shape), 1, 16, dtype)
    return numbers[0] | numbers[1] << 4 | numbers[2] << 8 | numbers[3] << 12
