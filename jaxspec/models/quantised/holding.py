"""Choose the matrices of a model that are held in FP8: as published, rounded, or drawn."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_matrix import Form, Grain, Holder, WeightStack
from jaxspec.models.quantised.option import QuantisedOptions
from jaxspec.models.quantised.rounded import RoundedCheckpoint
from jaxspec.models.quantised.scheme import PER_ROW, PER_TENSOR, Scheme
from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import float8


class Float8Source(Protocol):
    """A checkpoint with weights in FP8."""

    def grain_of(self, name: str) -> Grain | None:
        """Return the grain in which a model can hold a weight in FP8."""
        ...


class Held(NamedTuple):
    """Names of weights."""

    here: frozenset[str] = frozenset()  # held in FP8
    on_hopper: frozenset[str] = frozenset()  # that a Hopper GPU would hold, in bfloat16


def may_hold(placement: Placement) -> bool:
    """Return whether the layer of a placement may hold its tensor in FP8."""
    return isinstance(placement.param, Holder) and placement.param.may_hold(placement)


def hold_as_published(
    of_ranks: Iterable[Iterable[Placement]],
    published: Mapping[str, list[str]],
    checkpoint: Float8Source,
    options: QuantisedOptions,
) -> Held:
    """Hold matrices of an abstract model in FP8 if the checkpoint has all their columns in it.

    Matrices that no kernel multiplies are held only if activations are rounded, which changes
    results.

    Args:
        of_ranks: The placements of the model on each device.
        published: The checkpoint's names of each canonical name.
        checkpoint: The open checkpoint.
        options: Those of `LLM`.

    Returns:
        The checkpoint's names of the weights.
    """
    if options.dequantises:
        return Held()

    def grain_of(placement: Placement) -> Grain | None:
        return checkpoint.grain_of(published[placement.name][0])

    chosen = _hold(of_ranks, grain_of, options)
    return Held(*(frozenset(published[name][0] for name in names) for names in chosen))


def rounding(
    checkpoint: Checkpoint, placements: Iterable[Placement], published: Mapping[str, list[str]]
) -> RoundedCheckpoint:
    """Return the checkpoint with the matrices rounded that layers may hold in FP8.

    Args:
        checkpoint: The weights, in 16 or 32 bits.
        placements: The placements of the model.
        published: The checkpoint's names of each canonical name.
    """
    chosen = filter(may_hold, placements)
    return RoundedCheckpoint(checkpoint, (published[each.name][0] for each in chosen))


def hold_drawn(
    of_ranks: Iterable[Iterable[Placement]], scheme: Scheme | None, options: QuantisedOptions
) -> Held:
    """Hold matrices of an abstract model whose weights are drawn, as those of a folder in FP8.

    Args:
        of_ranks: As in `hold_as_published`.
        scheme: The scheme of the folder; None for weights in 16 bits.
        options: As in `hold_as_published`.

    Returns:
        Canonical names of the weights.
    """
    if options.dequantises or scheme is None or not scheme.grains:
        return Held()
    if scheme.input_bits not in (None, 8):  # its weights are in 4 bits
        return Held()
    has_rows = not scheme.grains.isdisjoint((PER_TENSOR, PER_ROW))
    grain = Grain.ROWS if has_rows else Grain.BLOCKS
    return _hold(of_ranks, lambda placement: grain, options)


def _hold(
    of_ranks: Iterable[Iterable[Placement]],
    grain_of: Callable[[Placement], Grain | None],
    options: QuantisedOptions,
) -> Held:
    """Hold the matrices whose placements have one grain; return canonical names."""
    of_matrices: dict[int, tuple[Holder, list[Placement]]] = {}
    for placements in of_ranks:
        for placement in filter(may_hold, placements):
            matrix = placement.param
            of_matrices.setdefault(id(matrix), (matrix, []))[1].append(placement)
    here, on_hopper = set[str](), set[str]()
    for matrix, parts in of_matrices.values():
        grains = set(map(grain_of, parts))
        grain = grains.pop() if len(grains) == 1 else None
        if grain is None or not all(matrix.fits(part, grain) for part in parts):
            continue
        form, names = Form(grain, options.terms), {part.name for part in parts}
        if _kernel_takes_sizes(matrix, form):
            on_hopper |= names
        if options.terms == 1 or _has_kernel(matrix, form):
            matrix.hold(form)
            here |= names
    return Held(frozenset(here), frozenset(on_hopper))


def _has_kernel(matrix: Holder, form: Form) -> bool:
    is_here = dispatch.has_kernels() and matrix.dtype == jnp.bfloat16
    return is_here and _kernel_takes_sizes(matrix, form)


def _kernel_takes_sizes(matrix: Holder, form: Form) -> bool:
    if isinstance(matrix, WeightStack):
        return matrix.has_kernel
    inner = matrix.shape[0]
    row = jax.ShapeDtypeStruct((1, inner), jnp.bfloat16)
    return float8.why_not_kernel(row, form.abstract(inner, matrix.eight_bits)) is None
