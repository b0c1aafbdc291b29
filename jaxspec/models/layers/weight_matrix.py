"""Matrices of linear layers and of experts, in the dtype of the model or as published in FP8."""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.layers.parameters import (
    NORMAL,
    Init,
    Picked,
    Placement,
    as_slice,
    box,
    declare,
)
from jaxspec.weight import (
    PUBLISHED_BLOCK,
    SCALED_COLUMNS,
    Columns,
    Dense,
    DenseExperts,
    ExpertsWeight,
    Float8BlockExperts,
    Float8Blocks,
    Float8RowExperts,
    Float8Rows,
    Published8Bit,
    Published8BitExperts,
    Weight,
)

# Ends of the names under which a checkpoint has the two parts of a tensor in FP8: its bytes, and
# float32 scales, `[ceil(rows / 64), ceil(columns / 128)]` with `Grain.BLOCKS`, else `[rows]`.
VALUES, SCALES = "/values", "/scales"

_FLOAT8, _FLOAT32 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float32)
_DRAWN_SCALE = 2.0**-12  # of random weights: 0.02 is stored as 80, and e4m3 ends at 448


class Grain(enum.Enum):
    """Granularity of the scales of a matrix in FP8; the values are types of weights."""

    BLOCKS = Float8Blocks
    ROWS = Float8Rows

    @property
    def unit(self) -> tuple[int, ...]:
        """Columns, and rows, of the matrix with one scale."""
        return (SCALED_COLUMNS, PUBLISHED_BLOCK) if self is Grain.BLOCKS else (1,)

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor `[columns, rows]`."""
        return tuple(-(-size // unit) for size, unit in zip(shape, self.unit, strict=False))


class Form(NamedTuple):
    """How a matrix in FP8 is stored and multiplied."""

    grain: Grain
    terms: int = 2  # of each activation, as in `Float8Blocks`

    def abstract(self, inner: int, columns: int) -> Published8Bit:
        """Return a matrix in this form, without values, as ops take it."""
        values, scales = (columns, inner), self.grain.scales((columns, inner))
        kind, terms = self.grain.value, self.terms

        def declared() -> Published8Bit:
            return kind(jnp.zeros(values, _FLOAT8), jnp.zeros(scales, _FLOAT32), terms=terms)

        return jax.eval_shape(declared)

    def abstract_experts(self, number: int, outer: int, inner: int) -> Published8BitExperts:
        """Return a stack of matrices in this form, without values, with whole blocks of features.

        Padding has no influence.
        """
        inner += -inner % PUBLISHED_BLOCK
        scales = number, *self.grain.scales((outer, inner))
        terms = self.terms
        kind = Float8BlockExperts if self.grain is Grain.BLOCKS else Float8RowExperts

        def declared() -> Published8BitExperts:
            values = jnp.zeros((number, outer, inner), _FLOAT8)
            return kind(values, jnp.zeros(scales, _FLOAT32), terms=terms)

        return jax.eval_shape(declared)


class WeightMatrix(nnx.Module):
    """A matrix `[inner, outer]` that one linear layer owns, or several.

    Placements refer to it as to a parameter. `stored` replaces them by placements of its
    parameters: an array in the dtype of the model; or values and scales in FP8, and an array with
    the columns from `eight_bits` on, which stay in the dtype of the model.
    """

    def __init__(
        self,
        inner: int,
        outer: int,
        dtype: jnp.dtype,
        *,
        init: Init = NORMAL,
        eight_bits: int | None = None,
    ):
        """Declare the matrix in `dtype`.

        Args:
            inner: Number of rows: input features.
            outer: Number of columns: output features and padding.
            dtype: Dtype of the model.
            init: See `declare`.
            eight_bits: Number of first columns that may be in FP8; None means all.
        """
        self.shape, self.dtype, self.init = (inner, outer), jnp.dtype(dtype), init
        self.eight_bits = outer if eight_bits is None else eight_bits
        self.form: Form | None = None
        self.array: nnx.Param | None = declare(self.shape, dtype, init)
        self.values: nnx.Param | None = nnx.data(None)
        self.scales: nnx.Param | None = nnx.data(None)

    def hold(self, form: Form) -> None:
        """Change the form of a matrix that has no values yet."""
        inner, outer = self.shape
        whole, rest = form.abstract(inner, self.eight_bits), outer - self.eight_bits
        self.form = form
        self.values = nnx.Param(whole.array, init=_DrawnValues(self.init))
        self.scales = nnx.Param(whole.scale, init=_draw_scales)
        others = jax.ShapeDtypeStruct((inner, rest), self.dtype)
        self.array = nnx.Param(others, init=self.init) if rest else None

    @property
    def operand(self) -> Weight:
        """The matrix as ops take it; all columns may be in FP8."""
        first = self.eight_bit_operand
        if first is None:
            assert self.array is not None
            return Dense(self.array[...])
        assert self.array is None, "some columns are in 16 bits: ops take the matrix as `columns`"
        return first

    def part(self, index: tuple[slice, slice]) -> Dense:
        """Copy a part of a matrix that is not in FP8; `index` has rows and columns."""
        assert self.form is None and self.array is not None
        return Dense(self.array[...][index])

    @property
    def columns(self) -> Weight | Columns:
        """The matrix as ops take it that accept columns of different types."""
        first = self.eight_bit_operand
        if first is None or self.array is None:
            return self.operand
        return Columns((first, Dense(self.array[...])))

    @property
    def eight_bit_operand(self) -> Published8Bit | None:
        """The columns in FP8 as ops take them; None if there are none."""
        if self.form is None or self.values is None or self.scales is None:
            return None
        kind, terms = self.form.grain.value, self.form.terms
        return kind(self.values[...], self.scales[...], terms=terms)

    def may_hold(self, placement: Placement) -> bool:
        """Return whether the columns of a placement may be in FP8."""
        return self._extents(placement)[0][0].start < self.eight_bits

    def fits(self, placement: Placement, grain: Grain) -> bool:
        """Return whether the scales of a placement's tensor are scales of the matrix, too."""
        target, source = self._extents(placement)
        has_all_rows = len(target[1]) == self.shape[0]
        return None not in _units(target, source, grain) and (has_all_rows or grain is Grain.BLOCKS)

    def stored(self, placement: Placement) -> Iterator[Placement]:
        """Yield placements of the parameters in place of a placement of the matrix."""
        target, source = self._extents(placement)
        columns, rows = (slice(each.start, each.stop) for each in target)
        if self.form is None or not self.may_hold(placement):
            first = 0 if self.form is None else self.eight_bits
            index = rows, slice(columns.start - first, columns.stop - first)
            yield dataclasses.replace(placement, param=self.array, index=index)
            return
        common = {"transpose": False, "segments": None, "instead": None}
        yield dataclasses.replace(
            placement,
            name=placement.name + VALUES,
            param=self.values,
            index=(columns, rows),
            scale=1.0,
            **common,
        )
        units = list(filter(None, _units(target, source, self.form.grain)))
        yield dataclasses.replace(
            placement,
            name=placement.name + SCALES,
            shape=self.form.grain.scales(placement.shape),
            param=self.scales,
            index=tuple(unit.target for unit in units),
            part=tuple(unit.source for unit in units),
            **common,
        )

    def _extents(self, placement: Placement) -> tuple[tuple[range, range], list[Picked]]:
        """Return a placement's columns and rows of the matrix, and those of its tensor."""
        rows, columns = box(self.shape, placement.index)
        assert isinstance(rows, range) and isinstance(columns, range)
        return (columns, rows), box(placement.shape, placement.part)


class WeightStack(nnx.Module):
    """A stack of experts' matrices `[experts, outer, inner]`, with the use of a `WeightMatrix`."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: jnp.dtype, init: Init, *, has_kernel: bool
    ):
        """Declare the stack in `dtype`.

        Args:
            shape: Number of experts, output features and input features.
            dtype: Dtype of the model.
            init: See `declare`.
            has_kernel: True if a kernel multiplies matrices of these sizes in FP8.
        """
        self.shape, self.dtype, self.init = shape, jnp.dtype(dtype), init
        self.has_kernel = has_kernel
        self.form: Form | None = None
        self.array: nnx.Param | None = declare(shape, dtype, init)
        self.values: nnx.Param | None = nnx.data(None)
        self.scales: nnx.Param | None = nnx.data(None)

    def hold(self, form: Form) -> None:
        """Change the form of a stack that has no values yet."""
        abstract = form.abstract_experts(*self.shape)
        self.form, self.array = form, None
        self.values = nnx.Param(abstract.array, init=_DrawnStack(self.init))
        self.scales = nnx.Param(abstract.scale, init=_draw_scales)

    @property
    def operand(self) -> ExpertsWeight:
        """The stack as ops take it."""
        if self.form is None or self.values is None or self.scales is None:
            assert self.array is not None
            return DenseExperts(self.array[...])
        kind = Float8BlockExperts if self.form.grain is Grain.BLOCKS else Float8RowExperts
        return kind(self.values[...], self.scales[...], terms=self.form.terms)

    def may_hold(self, placement: Placement) -> bool:
        """Return True: all matrices of the stack may be in FP8."""
        return True

    def fits(self, placement: Placement, grain: Grain) -> bool:
        """Return whether the scales of a placement's tensor are scales of the experts, too."""
        _, target, source = self._extents(placement)
        return None not in _units(target, source, grain)

    def stored(self, placement: Placement) -> Iterator[Placement]:
        """Yield placements of the parameters in place of a placement of the stack."""
        if self.form is None:
            yield dataclasses.replace(placement, param=self.array)
            return
        experts, target, source = self._extents(placement)
        units = list(filter(None, _units(target, source, self.form.grain)))
        (*whole, outer, inner), index = placement.shape, slice(experts.start, experts.stop)
        first = box(placement.shape, placement.part)[: len(whole)]  # of a tensor of all experts
        common = {"segments": None, "instead": None}
        yield dataclasses.replace(
            placement,
            name=placement.name + VALUES,
            param=self.values,
            index=(index, *(slice(each.start, each.stop) for each in target)),
            scale=1.0,
            **common,
        )
        yield dataclasses.replace(
            placement,
            name=placement.name + SCALES,
            shape=(*whole, *self.form.grain.scales((outer, inner))),
            param=self.scales,
            index=(index, *(unit.target for unit in units)),
            part=(
                *(as_slice(np.asarray(each)) for each in first),
                *(unit.source for unit in units),
            ),
            **common,
        )

    def _extents(self, placement: Placement) -> tuple[range, list[range], list[Picked]]:
        """Return a placement's experts, their rows and columns, and those of its tensor."""
        experts, *target = map(_as_range, box(self.shape, placement.index))
        return experts, target, box(placement.shape, placement.part)[-2:]


def _as_range(picked: Picked) -> range:
    assert isinstance(picked, range)
    return picked


class _Units(NamedTuple):
    """Indices along an axis of scales."""

    target: slice
    source: slice | np.ndarray


def _units(target: Sequence[range], source: Sequence[Picked], grain: Grain) -> list[_Units | None]:
    """Return the scales of an extent along each axis; None where scales would be of other rows."""
    return [_along(*each) for each in zip(target, source, grain.unit, strict=False)]


def _along(target: range, source: Picked, unit: int) -> _Units | None:
    if isinstance(source, range) and source.step == 1:  # as nearly all; there are many experts
        if target.start % unit or source.start % unit:
            return None
        count, starts = -(-len(source) // unit), (target.start // unit, source.start // unit)
        return _Units(*(slice(start, start + count) for start in starts))
    places = np.asarray(source)
    firsts, within = places[::unit], np.arange(len(places)) % unit
    are_whole = (places == np.repeat(firsts, unit)[: len(places)] + within).all()
    if not are_whole or target.start % unit or (firsts % unit).any():
        return None
    first = target.start // unit
    return _Units(slice(first, first + len(firsts)), as_slice(firsts // unit))


Holder = WeightMatrix | WeightStack


def parts_of(name: str) -> tuple[str, str]:
    """Split the name of a stored part into that of its tensor, and `VALUES`, `SCALES` or ""."""
    part = next(filter(name.endswith, (VALUES, SCALES)), "")
    return name.removesuffix(part), part


def matrices_of(module: nnx.Module) -> list[Holder]:
    """Return the matrices of a model, in an order that depends on its structure alone."""
    return [found for _, found in nnx.iter_modules(module) if isinstance(found, Holder)]


def forms_of(module: nnx.Module) -> tuple[Form | None, ...]:
    """Return the form of each of `matrices_of`."""
    return tuple(matrix.form for matrix in matrices_of(module))


def hold(module: nnx.Module, forms: Iterable[Form | None]) -> None:
    """Change the forms of an abstract model's matrices to those of `forms_of` another one."""
    for matrix, form in zip(matrices_of(module), forms, strict=True):
        if form is not None:
            matrix.hold(form)


def stored(placements: Iterable[Placement]) -> Iterator[Placement]:
    """Yield the placements of parameters, in place of those of matrices."""
    for placement in placements:
        matrix = placement.param
        yield from matrix.stored(placement) if isinstance(matrix, Holder) else (placement,)


@dataclasses.dataclass(frozen=True)  # unlike a tuple, `jax.jit` takes it
class _DrawnValues:
    """Draws values for scales of `_draw_scales`."""

    init: Init  # of a matrix `[inner, outer]`

    def __call__(self, key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
        return (self.init(key, shape[::-1], _FLOAT32).T / _DRAWN_SCALE).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _DrawnStack:
    """The same for a stack of experts' matrices."""

    init: Init  # of `[experts, outer, inner]`

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return (self.init(key, shape, _FLOAT32) / _DRAWN_SCALE).astype(dtype)


def _draw_scales(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.full(shape, _DRAWN_SCALE, dtype)
