"""The best of a row of scores: one definition for sampling, for the greedy op and its kernel."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NOTHING = -1  # `sampling.NO_TOKEN`
NO_COLUMN = 2**30  # behind all columns


def best_of(
    found: Sequence[Float[Array, "..."] | Int[Array, "..."]], axis: int
) -> Int[Array, " rows"]:
    """The column (int32) of the best score along an axis, of equals the lowest; -1 if none is.

    `found`: the best of some scores, its column, and the largest `-abs(score)` of these, which is
    NaN if a score is, and -inf if none is finite.
    """

    def better(one, other):
        ((score, column, nearest), (score2, column2, nearest2)) = one, other
        wins = (score > score2) | ((score == score2) & (column < column2))
        # XLA's maximum on a CPU may lose a NaN.
        is_nearer = (nearest > nearest2) | jnp.isnan(nearest)
        return (
            jnp.where(wins, score, score2),
            jnp.where(wins, column, column2),
            jnp.where(is_nearer, nearest, nearest2),
        )

    # One reduction: of a maximum each XLA would make as many kernels, of few rows twice.
    nothing = -jnp.inf, jnp.int32(NO_COLUMN), -jnp.inf
    _, column, nearest = lax.reduce(tuple(found), nothing, better, (axis,))
    return jnp.where(nearest > -jnp.inf, column, NOTHING)


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
