"""The greedy token of each row: the output head and the search for its best score, in one."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas import dispatch, gemm, products
from jaxspec.pallas.products import matmul

NOTHING = -1  # `sampling.NO_TOKEN`


def argmax_matmul(
    x: Float[Array, "rows features"],
    weight: Float[Array, "features ids"],
    forbidden: Int[Array, "rows slots"],
) -> Int[Array, " rows"]:
    """The column (int32) of the largest of `x @ weight`, in float32; of equals the lowest.

    A row's `forbidden` columns (int32) are passed over; what is no column, as -1, forbids nothing.
    Where a score is NaN, or no score that is not forbidden is finite, there is none: -1.

    One kernel of 16 to 64 rows in 16 bits: with 248,320 columns the scores of 64 are 64 MB, which
    are not written. Fewer rows have few scores; of more, XLA's product is as much faster.

    Raises:
        ValueError: `weight` is not for the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    why = gemm.unsupported(x, weight, x.shape[1])
    if why is None and x.shape[0] > gemm.MEMORY_BOUND_ROWS:
        why = f"more than {gemm.MEMORY_BOUND_ROWS} rows"
    if dispatch.runs_kernel("argmax_matmul", why, by_choice=True):
        from jaxspec.pallas.argmax_matmul_kernel import argmax_matmul_kernel

        return argmax_matmul_kernel(x, weight, forbidden)
    return argmax_matmul_reference(x, weight, forbidden)


def argmax_matmul_reference(x, weight, forbidden):
    """The specification of `argmax_matmul`."""
    scores = without(matmul(x, weight, jnp.float32), forbidden)
    return pick(scores, is_sound(scores))


def without(
    scores: Float[Array, "rows ids"], forbidden: Int[Array, "rows slots"]
) -> Float[Array, "rows ids"]:
    """`scores` with -inf at each row's `forbidden` columns; -1 forbids nothing."""
    # Past the end nothing is set; -1 would be the last column.
    columns = jnp.where(forbidden < 0, scores.shape[1], forbidden)
    rows = jnp.arange(len(scores), dtype=jnp.int32)[:, None]
    # In place, where the scores are not read again. Comparing what is forbidden with every id of a
    # large vocabulary makes XLA write a mask of that size: more than what a draw reads.
    return scores.at[rows, columns].set(-jnp.inf, mode="drop")


def is_sound(scores: Float[Array, "rows ids"]) -> Bool[Array, " rows"]:
    """Whether a row has a choice: something finite, and no NaN."""
    return jnp.isfinite(scores).any(axis=1) & ~jnp.isnan(scores).any(axis=1)


def pick(scores: Float[Array, "rows ids"], sound: Bool[Array, " rows"]) -> Int[Array, " rows"]:
    """The column (int32) of the largest score, of equals the lowest; -1 in rows not `sound`."""
    return jnp.where(sound, jnp.argmax(scores, axis=1).astype(jnp.int32), NOTHING)
