"""Products of 16 to 256 rows: which of them are kernels, and how those are cut.

XLA's reach 2.1 to 3.2 TB/s of an H200's 4.2 at 64 rows. Ours put out partial sums where that gives
every multiprocessor a block, as `split_matmul`, and `matmul_silu` gates what it multiplied.
"""

from math import ceil

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch, mosaic
from jaxspec.pallas.few_rows import check_inner, gated, matmul

COLUMNS = 64  # of a piece of a block
_MOST_ROWS = 256
FEW_ENOUGH = 64  # rows: the memory bounds their products, whatever their number
_WIDE = 2048  # features of a model: more rows of a wider one cuBLAS multiplies near the peak
_ROWS = 128  # of a block
_DTYPES = jnp.bfloat16, jnp.float16


def rows_of(tokens: int) -> tuple[int, int]:
    """Rows of a block, a multiple of 8, and how many blocks share the tokens."""
    blocks = ceil(tokens / _ROWS)
    return 8 * ceil(tokens / blocks / 8), blocks


def parts_of(tokens: int, inner: int, outer: int) -> int:
    """Into how many parts the features are cut: a block on nearly every multiprocessor."""
    blocks = rows_of(tokens)[1] * ceil(outer / COLUMNS)
    most, chunks = max(1, mosaic.MULTIPROCESSORS // blocks), inner // 64
    return max(parts for parts in range(1, most + 1) if chunks % parts == 0)


def unsupported(
    x: Float[Array, "rows inner"], weight: Float[Array, "inner outer"], hidden: int
) -> str | None:
    """Why no kernel takes this product of a model so wide, or None."""
    if x.dtype not in _DTYPES or x.dtype != weight.dtype:
        return f"{x.dtype} and {weight.dtype}"
    if hidden < 1024:  # nobody waits for it
        return f"{hidden} features"
    if weight.shape[0] % 64 or weight.shape[1] % COLUMNS:
        return f"a weight of {weight.shape[0]} x {weight.shape[1]}"
    most = FEW_ENOUGH if hidden > _WIDE else _MOST_ROWS
    if x.shape[0] % 8 or not 8 < x.shape[0] <= most:  # last: what changes from program to program
        return f"not 16 to {most} rows, in steps of 8"
    return None


def matmul_silu(
    x: Float[Array, "tokens features"], weight: Float[Array, "features twice_inner"]
) -> Float[Array, "tokens inner"]:
    """`silu(gate) * other`, as a gated feed-forward layer begins, in the dtype of `x`.

    The columns of `x @ weight` are as many gates and then others (Shazeer 2020, "GLU Variants
    Improve Transformer", arXiv 2002.05202). They are rounded before they are multiplied. Rows do
    not meet: padding and NaN stay in their own.

    One kernel of 16 to 64 rows in 16 bits, of up to 256 with up to 2048 features.

    Raises:
        ValueError: `weight` is not for the features of `x`.
    """
    check_inner(x.shape[1], weight)
    if dispatch.runs_kernel("matmul_silu", _cannot_gate(x, weight), by_choice=True):
        from jaxspec.pallas.gemm_kernel import matmul_silu_kernel

        return matmul_silu_kernel(x, weight)
    return matmul_silu_reference(x, weight)


def matmul_silu_reference(x, weight):
    """The specification of `matmul_silu`."""
    return gated(matmul(x, weight))


def _cannot_gate(x, weight):
    """Why `matmul_silu_kernel` does not take these operands, or None."""
    if weight.shape[1] % (2 * COLUMNS):
        return f"{weight.shape[1]} gates and others"
    why, blocks = unsupported(x, weight, x.shape[1]), weight.shape[1] // (2 * COLUMNS)
    if why is None and x.shape[0] > FEW_ENOUGH:
        blocks *= rows_of(x.shape[0])[1]
        if blocks > mosaic.MULTIPROCESSORS:  # some would have twice the work of others
            return f"{blocks} blocks"
    return why
