"""Choose the matrices of a model that are held in 8 or 4 bits: as published, rounded, or drawn."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_form import Form, Grain
from jaxspec.models.layers.weight_matrix import Holder, WeightStack
from jaxspec.models.quantised.option import QuantisedOptions
from jaxspec.models.quantised.rounded import RoundedCheckpoint
from jaxspec.models.quantised.scheme import PER_ROW, PER_TENSOR, Scheme
from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import published_ops
from jaxspec.weight import INT4_GROUPS


class HeldSource(Protocol):
    """A checkpoint with weights that a model can hold in 8 or 4 bits."""

    def grain_of(self, name: str) -> Grain | None:
        """Return the grain in which a model can hold a weight; None if there is none."""
        ...


class Held(NamedTuple):
    """Weights by name, and the grains in which they are held."""

    here: Mapping[str, Grain]
    on_hopper: Mapping[str, Grain]  # by a Hopper GPU, in bfloat16


def may_hold(placement: Placement) -> bool:
    """Return whether the layer of a placement may hold its tensor in 8 or 4 bits."""
    return isinstance(placement.param, Holder) and placement.param.may_hold(placement)


def hold_as_published(
    of_ranks: Iterable[Iterable[Placement]],
    published: Mapping[str, list[str]],
    checkpoint: HeldSource,
    options: QuantisedOptions,
) -> Held:
    """Hold matrices of an abstract model whose columns the checkpoint has in one grain.

    Matrices that no kernel multiplies are held only if activations are rounded, which changes
    results.

    Args:
        of_ranks: The placements of the model on each device.
        published: The checkpoint's names of each canonical name.
        checkpoint: The open checkpoint.
        options: Those of `LLM`.

    Returns:
        Weights by the checkpoint's names.
    """
    if options.dequantises:
        return Held({}, {})

    def grain_of(placement: Placement) -> Grain | None:
        return checkpoint.grain_of(published[placement.name][0])

    chosen = _hold(of_ranks, grain_of, options)
    return Held(*({published[name][0]: grain for name, grain in each.items()} for each in chosen))


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
    """Hold matrices of an abstract model whose weights are drawn, as those of a quantised folder.

    Args:
        of_ranks: As in `hold_as_published`.
        scheme: The scheme of the folder; None for weights in 16 bits.
        options: As in `hold_as_published`.

    Returns:
        Weights by canonical names.
    """
    grain = None if scheme is None or options.dequantises else _drawn_grain(scheme)
    return _hold(of_ranks, lambda placement: grain, options)


def _drawn_grain(scheme: Scheme) -> Grain | None:
    """Return a grain that the weights of a folder may have: in FP8 if it declares that."""
    if scheme.grains and not scheme.has_float4:
        has_rows = not scheme.grains.isdisjoint((PER_TENSOR, PER_ROW))
        return Grain.ROWS if has_rows else Grain.BLOCKS
    if scheme.bits:
        return _drawn_integers(scheme)
    return Grain.FLOAT4 if scheme.has_float4 else None


def _drawn_integers(scheme: Scheme) -> Grain | None:
    declared = [group for group in scheme.groups if group is not None]
    sizes = [size for size in INT4_GROUPS if not any(group % size for group in declared)]
    if scheme.bits != {4} or not sizes or (scheme.has_order and declared):
        return None
    return Grain.int4(sizes[0], has_zeros=scheme.has_zeros)


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
    here, on_hopper = dict[str, Grain](), dict[str, Grain]()
    for matrix, parts in of_matrices.values():
        grains = set(map(grain_of, parts))
        grain = grains.pop() if len(grains) == 1 else None
        if grain is None or not all(matrix.fits(part, grain) for part in parts):
            continue
        form = Form(grain, options.terms) if grain.has_terms else Form(grain)
        names = {part.name: grain for part in parts}
        if _kernel_takes_sizes(matrix, form):
            on_hopper |= names
        if form.terms == 1 or _has_kernel(matrix, form):
            matrix.hold(form)
            here |= names
    return Held(here, on_hopper)


def _has_kernel(matrix: Holder, form: Form) -> bool:
    is_here = dispatch.has_kernels() and matrix.dtype == jnp.bfloat16
    return is_here and _kernel_takes_sizes(matrix, form)


def _kernel_takes_sizes(matrix: Holder, form: Form) -> bool:
    if isinstance(matrix, WeightStack):
        return matrix.has_kernel
    inner = matrix.shape[0]
    row = jax.ShapeDtypeStruct((1, inner), jnp.bfloat16)
    return published_ops.why_not_kernel(row, form.abstract(inner, matrix.published_columns)) is None
