"""The greedy token of each row: the output head and the search for its best score, in one."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import products
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.matmul.scores import best_of, without

_FEWEST_ROWS = 8


def argmax_matmul(
    x: Float[Array, "rows features"],
    weight: Float[Array, "features ids"],
    forbidden: Int[Array, "rows slots"],
) -> Int[Array, " rows"]:
    """The column (int32) of the largest of `x @ weight`, in float32; of equals the lowest.

    A row's `forbidden` columns (int32) are passed over; what is no column, as -1, forbids nothing.
    Where a score is NaN, or no score that is not forbidden is finite, there is none: -1.

    One kernel of 8 rows or more in 16 bits: with 248,320 columns the scores of 256 are 254 MB,
    which are not written, nor read again. Fewer rows have few scores.

    Raises:
        ValueError: `weight` is not for the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    if not dispatch.runs_kernel("argmax_matmul", _unsupported(x, weight), by_choice=True):
        return argmax_matmul_reference(x, weight, forbidden)
    from jaxspec.pallas.matmul.argmax_matmul_kernel import argmax_matmul_kernel

    return argmax_matmul_kernel(x, weight, forbidden)


def argmax_matmul_reference(x, weight, forbidden):
    """The specification of `argmax_matmul`."""
    scores = without(matmul(x, weight, jnp.float32), forbidden)
    columns = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return best_of((scores, columns, -jnp.abs(scores)), axis=1)


def _unsupported(x, weight):
    """Why `argmax_matmul_kernel` does not take these operands, or None."""
    (rows, features), ids = x.shape, weight.shape[1]
    if x.dtype not in products.DTYPES or x.dtype != weight.dtype:
        return f"{x.dtype} and {weight.dtype}"
    if features < 1024:  # nobody waits for it
        return f"{features} features"
    if features % 64 or ids % 8:
        return f"a weight of {features} x {ids}"
    if rows < _FEWEST_ROWS:  # last: what changes from program to program
        return f"less than {_FEWEST_ROWS} rows"
    return None
