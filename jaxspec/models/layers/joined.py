"""One product in place of several: linear layers whose weights become parts of a common one."""

from collections.abc import Sequence

from jaxspec.models.layers.linear import Linear
from jaxspec.pallas.gpu.operands import ALIGNED_COLUMNS


def side_by_side(parts: Sequence[Linear]) -> Linear:
    """The linear layer that gives the outputs of all `parts` for their common input.

    Its `split` gives each part's output, padding included; kernels can read it where it is. The
    parts must be new: their weights are columns of its weight from now on, and so are what their
    `checkpoint` fills.
    """
    outputs = {str(number): part.columns for number, part in enumerate(parts)}
    dtype, unit = parts[0].weight.dtype, ALIGNED_COLUMNS
    whole = Linear(parts[0].in_features, outputs, dtype, align=unit, multiple=unit)
    for part, column in zip(parts, whole.starts, strict=True):
        part.become_part(whole, 0, column)
    return whole


def summed(parts: Sequence[Linear]) -> Linear:
    """The linear layer that gives the sum of what `parts` give, for their inputs side by side.

    The parts must be new, and give as many outputs each, without padding: their weights are rows
    of its weight from now on.
    """
    rows = sum(part.in_features for part in parts)
    whole = Linear(rows, {"sum": parts[0].columns}, parts[0].weight.dtype)
    row = 0
    for part in parts:
        part.become_part(whole, row, 0)
        row += part.in_features
    return whole
