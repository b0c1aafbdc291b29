"""Merge linear layers into one, so that one matmul replaces several."""

from collections.abc import Sequence

from jaxspec.models.layers.linear import Linear
from jaxspec.pallas.gpu.operands import ALIGNED_COLUMNS


def side_by_side(parts: Sequence[Linear]) -> Linear:
    """Return a linear layer with the outputs of all `parts`, which have the same input.

    Its `split` returns each part's output, padding included, aligned so that kernels can read it in
    place. The parts must be new: their weights become columns of the merged weight, which their
    `checkpoint` then fills.
    """
    outputs = {str(number): part.columns for number, part in enumerate(parts)}
    dtype, unit = parts[0].weight.dtype, ALIGNED_COLUMNS
    whole = Linear(parts[0].in_features, outputs, dtype, align=unit, multiple=unit)
    for part, column in zip(parts, whole.starts, strict=True):
        part.become_part(whole, 0, column)
    return whole


def summed(parts: Sequence[Linear]) -> Linear:
    """Return a linear layer with the sum of the outputs of `parts`, for their inputs side by side.

    The parts must be new and have equally many outputs without padding: their weights become rows
    of the merged weight.
    """
    rows = sum(part.in_features for part in parts)
    whole = Linear(rows, {"sum": parts[0].columns}, parts[0].weight.dtype)
    row = 0
    for part in parts:
        part.become_part(whole, row, 0)
        row += part.in_features
    return whole
