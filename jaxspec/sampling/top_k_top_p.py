"""Top-k and top-p masks of logits.

Two processors have the same contract and serve different rows. `mask_small_top_k` serves requests
with a top-k of at most `MAX_SMALL_TOP_K`, in one pass over the logits. `mask_top_k_top_p` serves
every row, and may search. Both compute a row with a small top-k in the same way, so its tokens do
not depend on the batch.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.selection import LastKept
from jaxspec.requests.sampling_features import MAX_SMALL_TOP_K
from jaxspec.sampling.candidates import MAX_SORTED, largest
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.search import bound_of_mass, bound_of_top_k, last_id, mass, mass_within


class Ordered(NamedTuple):
    """Largest logits of each row in descending order; among equal ones, lower ids come first."""

    logits: Float[Array, "n count"]
    ids: Int[Array, "n count"]  # int32

    @property
    def masses(self) -> Float[Array, "n count"]:
        """Mass of each logit, relative to that of the row's likeliest one."""
        return mass(self.logits, self.logits[:, :1])

    def num_kept(
        self,
        top_k: Int[Array, " n"],
        top_p: Float[Array, " n"],
        total: Float[Array, " n"] | None = None,
    ) -> Int[Array, " n"]:
        """Return how many ids (int32) `top_k`, then `top_p` keep, if all of those are here.

        `total` is the mass of all that top-k keeps; None means that all of them are here. Masses
        are float32 sums in this order.
        """
        count = self.logits.shape[1]
        num_top_k = jnp.where((top_k > 0) & (top_k < count), top_k, count)
        is_kept = jnp.arange(count, dtype=jnp.int32)[None, :] < num_top_k[:, None]
        reached = jnp.cumsum(jnp.where(is_kept, self.masses, 0.0), axis=1)
        target = top_p * (reached[:, -1] if total is None else total)
        num_top_p = 1 + jnp.sum(reached < target[:, None], axis=1, dtype=jnp.int32)
        # A top-p of 1 keeps all ids; due to rounding, the test might drop the last ones.
        return jnp.minimum(num_top_k, jnp.where(top_p < 1.0, num_top_p, count))

    def last_kept(
        self,
        top_k: Int[Array, " n"],
        top_p: Float[Array, " n"],
        total: Float[Array, " n"] | None = None,
    ) -> LastKept:
        """Return the last of the `num_kept` ids."""
        last = (self.num_kept(top_k, top_p, total) - 1)[:, None]
        return LastKept(*(jnp.take_along_axis(x, last, axis=1)[:, 0] for x in self))


def mask_small_top_k(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Apply `mask_top_k_top_p` to the rows whose `top_k` is from 1 to `MAX_SMALL_TOP_K`."""
    few = Ordered(*largest(logits, min(MAX_SMALL_TOP_K, logits.shape[1])))
    last = few.last_kept(inputs.top_k, inputs.top_p)
    return last.where(has_small_top_k(inputs), LastKept.none(len(logits))).mask(logits)


def mask_top_k_top_p(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Mask ids (-inf) outside the `top_k` largest logits, then outside `top_p`.

    top-k keeps exactly k ids; among equal logits it keeps the lower ids, as a stable sort does.
    top-p (Holtzman et al. 2020, nucleus sampling) keeps the shortest run of the likeliest ids whose
    mass, renormalised after top-k, reaches `top_p`; the likeliest is always kept. A `top_k` of 0 or
    less, or of the vocabulary size or more, is off, and so is a `top_p` of 1.
    """
    vocab, top_k, top_p = logits.shape[1], inputs.top_k, inputs.top_p
    if vocab <= MAX_SORTED:
        every = Ordered(*largest(logits, vocab))
        few = Ordered(*(x[:, :MAX_SMALL_TOP_K] for x in every))
        other = every.last_kept(top_k, top_p)
    else:
        few = Ordered(*largest(logits, MAX_SMALL_TOP_K))
        other = last_in_large(logits, few, top_k, top_p, ~has_small_top_k(inputs))
    last = few.last_kept(top_k, top_p).where(has_small_top_k(inputs), other)
    is_on = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)
    return last.where(is_on, LastKept.none(len(logits))).mask(logits)


def last_in_large(
    logits: Float[Array, "n vocab"],
    few: Ordered,
    top_k: Int[Array, " n"],
    top_p: Float[Array, " n"],
    wanted: Bool[Array, " n"],
    floor: Float[Array, " n"] | float = -math.inf,
) -> LastKept:
    """Return the last kept ids, found by a search; arbitrary in rows that are not `wanted`.

    Logits under the `floor` count as -inf. Without top-k, the `few` largest usually reach the mass
    of top-p, and nothing is searched.
    """
    first = few.logits[:, 0]
    has_top_k = wanted & (top_k > 0) & (top_k < logits.shape[1])
    has_top_p = wanted & (top_p < 1.0)
    bound = bound_of_top_k(logits, top_k, has_top_k, floor)
    total = mass_within(logits, first, bound, has_top_p, floor)
    is_reached = has_top_p & ~has_top_k & (few.masses.sum(axis=1) >= top_p * total)
    is_searched = has_top_p & ~is_reached
    bound = bound_of_mass(logits, first, top_p * total, bound, is_searched, floor)
    searched = LastKept(bound.logit, last_id(logits, bound, (has_top_k | has_top_p) & ~is_reached))
    return few.last_kept(jnp.zeros_like(top_k), top_p, total).where(is_reached, searched)


def has_small_top_k(inputs: SamplingInputs) -> Bool[Array, " n"]:
    """Return the rows whose top-k is from 1 to `MAX_SMALL_TOP_K`."""
    return (inputs.top_k > 0) & (inputs.top_k <= MAX_SMALL_TOP_K)
