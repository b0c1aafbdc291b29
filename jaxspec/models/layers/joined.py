"""One product in place of several: linear layers whose weights become parts of a common one."""

from collections.abc import Sequence

from jaxspec.models.layers.linear import Linear
from jaxspec.pallas.matmul.products import BLOCK_N


def side_by_side(parts: Sequence[Linear]) -> Linear:
    """The linear layer that gives the outputs of all `parts` for their common input.

    Its `split` gives each part's output, padding included. The parts must be new: their weights
    are columns of its weight from now on, and so are what their `checkpoint` fills.
    """
    outputs = {str(number): part.columns for number, part in enumerate(parts)}
    whole = Linear(parts[0].in_features, outputs, parts[0].weight.dtype, multiple=BLOCK_N)
    column = 0
    for part in parts:
        part.become_part(whole, 0, column)
        column += part.columns
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
