"""Matrices of linear layers and of experts, in the dtype of the model or in 8 or 4 bits."""

import dataclasses
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
from jaxspec.models.layers.weight_form import (
    FACTORS,
    SCALES,
    VALUES,
    ZEROS,
    Form,
    Grain,
    Part,
    drawn,
)
from jaxspec.weight import (
    Columns,
    Dense,
    DenseExperts,
    ExpertsWeight,
    InputsFirstExperts,
    Published,
    Weight,
)


class WeightMatrix(nnx.Module):
    """A matrix `[inner, outer]` that one linear layer owns, or several.

    Placements refer to it as to a parameter. `stored` replaces them by placements of its
    parameters: an array in the dtype of the model; or the parts of a `Grain`, and an array with the
    columns from `published_columns` on, which stay in the dtype of the model.
    """

    def __init__(
        self,
        inner: int,
        outer: int,
        dtype: jnp.dtype,
        *,
        init: Init = NORMAL,
        published_columns: int | None = None,
    ):
        """Declare the matrix in `dtype`.

        Args:
            inner: Number of rows: input features.
            outer: Number of columns: output features and padding.
            dtype: Dtype of the model.
            init: See `declare`.
            published_columns: Number of first columns that may be in 8 or 4 bits; None means all.
        """
        self.shape, self.dtype, self.init = (inner, outer), jnp.dtype(dtype), init
        self.published_columns = outer if published_columns is None else published_columns
        self.form: Form | None = None
        self.array: nnx.Param | None = declare(self.shape, dtype, init)
        self.values: nnx.Param | None = nnx.data(None)
        self.scales: nnx.Param | None = nnx.data(None)
        self.zeros: nnx.Param | None = nnx.data(None)
        self.factors: nnx.Param | None = nnx.data(None)

    def hold(self, form: Form) -> None:
        """Change the form of a matrix that has no values yet."""
        inner, outer = self.shape
        whole, rest = form.abstract(inner, self.published_columns), outer - self.published_columns
        self.form = form
        for part in form.grain.parts:
            param = nnx.Param(getattr(whole, part.field), init=drawn(part, self.init))
            setattr(self, part.name, param)
        others = jax.ShapeDtypeStruct((inner, rest), self.dtype)
        self.array = nnx.Param(others, init=self.init) if rest else None

    @property
    def operand(self) -> Weight:
        """The matrix as ops take it; all columns may be in 8 or 4 bits."""
        first = self.published_operand
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
        first = self.published_operand
        if first is None or self.array is None:
            return self.operand
        return Columns((first, Dense(self.array[...])))

    @property
    def published_operand(self) -> Published | None:
        """The columns in 8 or 4 bits as ops take them; None if there are none."""
        if self.form is None:
            return None
        names = [part.name for part in self.form.grain.parts]
        return self.form.weight({name: getattr(self, name)[...] for name in names})

    def may_hold(self, placement: Placement) -> bool:
        """Return whether the columns of a placement may be in 8 or 4 bits."""
        return self._extents(placement)[0][0].start < self.published_columns

    def fits(self, placement: Placement, grain: Grain) -> bool:
        """Return whether the parts of a placement's tensor are parts of the matrix, too."""
        target, source = self._extents(placement)
        has_all_rows = len(target[1]) == self.shape[0]
        return all(
            None not in _units(target, source, part) and (has_all_rows or len(part.unit) == 2)
            for part in grain.parts
        )

    def stored(self, placement: Placement) -> Iterator[Placement]:
        """Yield placements of the parameters in place of a placement of the matrix."""
        target, source = self._extents(placement)
        if self.form is None or not self.may_hold(placement):
            columns, rows = (slice(each.start, each.stop) for each in target)
            first = 0 if self.form is None else self.published_columns
            index = rows, slice(columns.start - first, columns.stop - first)
            yield dataclasses.replace(placement, param=self.array, index=index)
            return
        for part in self.form.grain.parts:
            units = list(filter(None, _units(target, source, part)))
            index = tuple(unit.target for unit in units)
            columns, rows = placement.shape
            yield dataclasses.replace(
                placement,
                name=name_of_part(placement.name, part.name),
                shape=part.shape(columns, rows),
                param=getattr(self, part.name),
                transpose=part.transpose,
                index=index[::-1] if part.transpose else index,
                part=tuple(unit.source for unit in units),
                scale=placement.scale if part.is_scaled else 1.0,
                segments=None,
                instead=None,
            )

    def _extents(self, placement: Placement) -> tuple[tuple[range, range], list[Picked]]:
        """Return a placement's columns and rows of the matrix, and those of its tensor."""
        rows, columns = box(self.shape, placement.index)
        assert isinstance(rows, range) and isinstance(columns, range)
        return (columns, rows), box(placement.shape, placement.part)


class WeightStack(nnx.Module):
    """A stack of experts' matrices `[experts, outer, inner]`, with the use of a `WeightMatrix`."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: jnp.dtype,
        init: Init,
        *,
        has_kernel: bool,
        inputs_first: bool = False,
    ):
        """Declare the stack in `dtype`.

        Args:
            shape: Number of experts, output features and input features.
            dtype: Dtype of the model.
            init: See `declare`.
            has_kernel: True if a kernel multiplies matrices of these sizes in FP8.
            inputs_first: True if checkpoints, and so the stack, have the input features before the
                output features. Such a stack is never in 8 bits.
        """
        if inputs_first:
            experts, outer, inner = shape
            shape = experts, inner, outer
        self.inputs_first = inputs_first
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
        values, scales = (drawn(form.grain.part(name), self.init) for name in (VALUES, SCALES))
        self.values = nnx.Param(abstract.array, init=values)
        self.scales = nnx.Param(abstract.scale, init=scales)

    @property
    def operand(self) -> ExpertsWeight:
        """The stack as ops take it."""
        if self.form is None or self.values is None or self.scales is None:
            assert self.array is not None
            made = InputsFirstExperts if self.inputs_first else DenseExperts
            return made(self.array[...])
        return self.form.experts(self.values[...], self.scales[...])

    def may_hold(self, placement: Placement) -> bool:
        """Return whether the matrices of the stack may be in FP8: all or none."""
        return not self.inputs_first

    def fits(self, placement: Placement, grain: Grain) -> bool:
        """Return whether the scales of a placement's tensor are scales of the experts, too."""
        _, target, source = self._extents(placement)
        has_stacks = grain.experts is not None
        return has_stacks and None not in _units(target, source, grain.part(SCALES))

    def stored(self, placement: Placement) -> Iterator[Placement]:
        """Yield placements of the parameters in place of a placement of the stack."""
        if self.form is None:
            yield dataclasses.replace(placement, param=self.array)
            return
        experts, target, source = self._extents(placement)
        units = list(filter(None, _units(target, source, self.form.grain.part(SCALES))))
        (*whole, outer, inner), index = placement.shape, slice(experts.start, experts.stop)
        first = box(placement.shape, placement.part)[: len(whole)]  # of a tensor of all experts
        common = {"segments": None, "instead": None}
        yield dataclasses.replace(
            placement,
            name=name_of_part(placement.name, VALUES),
            param=self.values,
            index=(index, *(slice(each.start, each.stop) for each in target)),
            scale=1.0,
            **common,
        )
        yield dataclasses.replace(
            placement,
            name=name_of_part(placement.name, SCALES),
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
    """Indices along an axis of a part."""

    target: slice
    source: slice | np.ndarray


def _units(target: Sequence[range], source: Sequence[Picked], part: Part) -> list[_Units | None]:
    """Return the units of an extent along each axis; None where units would be of other rows."""
    elements = 1, part.elements
    return [_along(*each) for each in zip(target, source, part.unit, elements, strict=False)]


def _along(target: range, source: Picked, unit: int, elements: int) -> _Units | None:
    if target.start % unit or (elements > 1 and len(source) % unit):  # packed in whole units
        return None
    first, count = target.start // unit, -(-len(source) // unit)
    place = slice(first * elements, (first + count) * elements)
    if isinstance(source, range) and source.step == 1:  # as nearly all; there are many experts
        if source.start % unit:
            return None
        first = source.start // unit
        return _Units(place, slice(first * elements, (first + count) * elements))
    places = np.asarray(source)
    firsts, within = places[::unit], np.arange(len(places)) % unit
    are_whole = (places == np.repeat(firsts, unit)[: len(places)] + within).all()
    if not are_whole or (firsts % unit).any():
        return None
    picked = firsts[:, None] // unit * elements + np.arange(elements)
    return _Units(place, as_slice(picked.ravel()))


Holder = WeightMatrix | WeightStack


def name_of_part(tensor: str, part: str) -> str:
    """Return the name under which a checkpoint has a part of a tensor; for "", the tensor."""
    return f"{tensor}/{part}" if part else tensor


def parts_of(name: str) -> tuple[str, str]:
    """Split the name of a stored part into that of its tensor, and that of a part or ""."""
    tensor, slash, part = name.rpartition("/")
    return (tensor, part) if slash and part in (VALUES, SCALES, ZEROS, FACTORS) else (name, "")


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
