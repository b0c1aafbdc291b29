"""hold_as_published: choose the matrices of a model that are held in FP8, as published."""

from collections.abc import Iterable, Mapping

import jax

from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_matrix import Form, Holder, WeightStack
from jaxspec.models.quantised.checkpoint import QuantisedCheckpoint
from jaxspec.models.quantised.option import QuantisedOptions
from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import float8


def hold_as_published(
    of_ranks: Iterable[Iterable[Placement]],
    published: Mapping[str, list[str]],
    checkpoint: QuantisedCheckpoint,
    options: QuantisedOptions,
) -> frozenset[str]:
    """Hold matrices of an abstract model in FP8 if the checkpoint has all their columns in it.

    Matrices that no kernel multiplies are held only if activations are rounded, which changes
    results.

    Args:
        of_ranks: The placements of the model on each device.
        published: The checkpoint's names of each canonical name.
        checkpoint: The open checkpoint.
        options: Those of `LLM`.

    Returns:
        The checkpoint's names of the weights that are held in FP8.
    """
    if options.dequantises:
        return frozenset()
    of_matrices: dict[int, tuple[Holder, list[Placement]]] = {}
    for placements in of_ranks:
        for placement in placements:
            matrix = placement.param
            if isinstance(matrix, Holder) and matrix.may_hold(placement):
                of_matrices.setdefault(id(matrix), (matrix, []))[1].append(placement)
    held = set[str]()
    for matrix, parts in of_matrices.values():
        names = [published[part.name][0] for part in parts]
        grains = set(map(checkpoint.grain_of, names))
        grain = grains.pop() if len(grains) == 1 else None
        if grain is None or not all(matrix.fits(part, grain) for part in parts):
            continue
        form = Form(grain, options.terms)
        if options.terms == 1 or _has_kernel(matrix, form):
            matrix.hold(form)
            held.update(names)
    return frozenset(held)


def _has_kernel(matrix: Holder, form: Form) -> bool:
    if isinstance(matrix, WeightStack):
        return dispatch.has_kernels() and matrix.has_kernel
    inner = matrix.shape[0]
    row = jax.ShapeDtypeStruct((1, inner), matrix.dtype)
    why_not = float8.why_not_kernel(row, form.abstract(inner, matrix.eight_bits))
    return dispatch.has_kernels() and why_not is None
