"""Argmax of a row of scores: one definition for sampling, the greedy op and its kernel."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NO_TOKEN = -1
"""No token: padding, a placeholder draft, or a row of scores that has no argmax."""

NO_COLUMN = 2**30  # greater than every real column, so it loses every tie


class PartialArgmax(NamedTuple):
    """Argmax of some of a row's scores, which can be combined with those of other parts."""

    score: Float[Array, "..."]  # the largest score
    column: Int[Array, "..."]  # the first column with that score
    # The largest -abs(score): NaN if a score is NaN, -inf if none is finite.
    nearest: Float[Array, "..."]

    @property
    def winner(self) -> Int[Array, "..."]:
        """The column (int32); -1 if a score is NaN or none is finite."""
        return jnp.where(self.nearest > -jnp.inf, self.column, NO_TOKEN)


def combine(parts: PartialArgmax, axis: int) -> PartialArgmax:
    """Return the argmax of all parts along an axis; the lowest column wins ties."""

    def better(a, b):
        ((score_a, column_a, nearest_a), (score_b, column_b, nearest_b)) = a, b
        a_wins = (score_a > score_b) | ((score_a == score_b) & (column_a < column_b))
        # Not `maximum`: XLA's maximum on a CPU may drop a NaN.
        a_is_nearer = (nearest_a > nearest_b) | jnp.isnan(nearest_a)
        return (
            jnp.where(a_wins, score_a, score_b),
            jnp.where(a_wins, column_a, column_b),
            jnp.where(a_is_nearer, nearest_a, nearest_b),
        )

    # One reduction over all three: XLA would run three reductions as three kernels.
    identity = -jnp.inf, jnp.int32(NO_COLUMN), -jnp.inf
    return PartialArgmax(*lax.reduce(tuple(parts), identity, better, (axis,)))


def mask_columns(
    scores: Float[Array, "rows ids"], forbidden: Int[Array, "rows n"]
) -> Float[Array, "rows ids"]:
    """Set `scores` to -inf at each row's `forbidden` columns; -1 forbids nothing."""
    # A scatter drops columns past the end, but wraps -1 to the last column.
    columns = jnp.where(forbidden < 0, scores.shape[1], forbidden)
    rows = jnp.arange(len(scores), dtype=jnp.int32)[:, None]
    # A scatter runs in place if the scores are not read again. Comparing with every id of a large
    # vocabulary would write a mask of that size, which is more than a draw reads.
    return scores.at[rows, columns].set(-jnp.inf, mode="drop")


def has_argmax(scores: Float[Array, "rows ids"]) -> Bool[Array, " rows"]:
    """Return True for rows with an argmax: some score is finite, and none is NaN."""
    return jnp.isfinite(scores).any(axis=1) & ~jnp.isnan(scores).any(axis=1)


def argmax_or_none(
    scores: Float[Array, "rows ids"], is_sound: Bool[Array, " rows"]
) -> Int[Array, " rows"]:
    """Return the column (int32) of the largest score, the lowest on ties; -1 unless `is_sound`."""
    return jnp.where(is_sound, jnp.argmax(scores, axis=1).astype(jnp.int32), NO_TOKEN)
