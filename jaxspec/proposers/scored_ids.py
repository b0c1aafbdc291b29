"""Drafts that are scored over some ids alone: back to the target's vocabulary."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.sampling import NO_TOKEN


def ids_at(indices: Int[Array, " rows"], ids: Int[Array, " scored"]) -> Int[Array, " rows"]:
    """The ids (int32) at `indices`; -1 stays, which says that there is none."""
    return jnp.where(indices < 0, NO_TOKEN, ids[indices])


def over_all_ids(
    scores: Float[Array, "rows scored"], ids: Int[Array, " scored"], vocab_size: int
) -> Float[Array, "rows vocab"]:
    """`scores` of `ids` (ascending), and -inf for what is never drafted.

    Rejection sampling stays exact: it needs the distribution q that a draft was drawn from, and
    softmax gives the other ids q = 0. The target's share of those comes from the excess p - q.
    """
    all_scores = jnp.full((scores.shape[0], vocab_size), -jnp.inf, scores.dtype)
    return all_scores.at[:, ids].set(scores, indices_are_sorted=True, unique_indices=True)
