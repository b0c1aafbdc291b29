"""Products of 16 to 256 rows: which of them are kernels, and how those are cut.

XLA's reach 2.1 to 3.2 TB/s of an H200's 4.2 at 64 rows. Ours are the product of `norm_matmul`,
`split_matmul`, which puts out partial sums where that gives every multiprocessor a block, and
`matmul_silu`, which gates what it multiplied.
"""

from math import ceil

from jaxtyping import Array, Float

from jaxspec.pallas import mosaic
from jaxspec.pallas.products import COLUMNS, DTYPES

_MOST_ROWS = 256
MEMORY_BOUND_ROWS = 64  # rows: the memory bounds their products, whatever their number
_WIDE = 2048  # features of a model: more rows of a wider one cuBLAS multiplies near the peak
_ROWS = 128  # of a block


def rows_of(tokens: int) -> tuple[int, int]:
    """Rows of a block, a multiple of 8, and how many blocks share the tokens."""
    blocks = ceil(tokens / _ROWS)
    return 8 * ceil(tokens / blocks / 8), blocks


def parts_of(tokens: int, inner: int, outer: int) -> int:
    """Into how many parts the features are cut: a block on nearly every multiprocessor."""
    return mosaic.parts(rows_of(tokens)[1] * ceil(outer / COLUMNS), inner // 64)


def unsupported(
    x: Float[Array, "rows inner"], weight: Float[Array, "inner outer"], hidden: int
) -> str | None:
    """Why no kernel takes this product of a model so wide, or None."""
    if x.dtype not in DTYPES or x.dtype != weight.dtype:
        return f"{x.dtype} and {weight.dtype}"
    if hidden < 1024:  # nobody waits for it
        return f"{hidden} features"
    if weight.shape[0] % 64 or weight.shape[1] % COLUMNS:
        return f"a weight of {weight.shape[0]} x {weight.shape[1]}"
    most = MEMORY_BOUND_ROWS if hidden > _WIDE else _MOST_ROWS
    if x.shape[0] % 8 or not 8 < x.shape[0] <= most:  # last: what changes from program to program
        return f"not 16 to {most} rows, in steps of 8"
    return None
