"""top-k and top-p: which ids may be drawn at all.

Two processors have one contract and differ in the rows that they serve. `mask_small_top_k` serves
requests with a top-k of at most `MAX_SMALL`: it looks for the likeliest ids and never sorts a large
vocabulary. `mask_top_k_top_p` serves every row. A row with a small top-k goes the same way in both,
so its tokens do not depend on the batch that it is in.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampler import MAX_SMALL_TOP_K
from jaxspec.sampling.candidates import largest
from jaxspec.sampling.params import SamplingInputs


class LastKept(NamedTuple):
    """The last id that each row keeps, in the order of its logits; of equal ones the lower first.

    It tells of every other id which side it is on, so nothing is scattered back.
    """

    logit: Float[Array, " n"]
    id: Int[Array, " n"]  # int32


def mask_small_top_k(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """`mask_top_k_top_p` of the rows whose `top_k` is from 1 to `MAX_SMALL_TOP_K`."""
    few = largest(logits, min(MAX_SMALL_TOP_K, logits.shape[1]))
    return _mask_behind(logits, _last_of(*few, inputs), _has_small_top_k(inputs))


def mask_top_k_top_p(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """`logits` (float32) with -inf outside the `top_k` largest, then outside `top_p`.

    top-k keeps exactly k ids: of equal logits the lower ids, as a stable sort does. top-p
    (Holtzman et al. 2020, nucleus sampling) keeps the shortest run of the likeliest ids
    whose mass, renormalised after top-k, reaches `top_p`; the likeliest always stays. A `top_k` of
    0 or less, or of the vocabulary or more, is off, and so is a `top_p` of 1.
    """
    vocab, top_k = logits.shape[1], inputs.top_k
    values, ids = _in_order(logits)
    few = min(MAX_SMALL_TOP_K, vocab)
    small = _last_of(values[:, :few], ids[:, :few], inputs)
    other = _last_of(values, ids, inputs)
    has_small = _has_small_top_k(inputs)
    last = LastKept(*(jnp.where(has_small, a, b) for a, b in zip(small, other, strict=True)))
    is_on = ((top_k > 0) & (top_k < vocab)) | (inputs.top_p < 1.0)
    return _mask_behind(logits, last, is_on)


def _has_small_top_k(inputs: SamplingInputs) -> Bool[Array, " n"]:
    return (inputs.top_k > 0) & (inputs.top_k <= MAX_SMALL_TOP_K)


def _in_order(
    logits: Float[Array, "n vocab"],
) -> tuple[Float[Array, "n vocab"], Int[Array, "n vocab"]]:
    """All logits from the largest on, of equal ones the lower ids first, and their ids (int32)."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    negated, order = lax.sort((-logits, ids), num_keys=1, is_stable=True, dimension=1)
    return -negated, order


def _last_of(
    values: Float[Array, "n count"], ids: Int[Array, "n count"], inputs: SamplingInputs
) -> LastKept:
    """The last of each row's ids that top-k and top-p keep, if these are all that it may keep.

    `values` are the logits in descending order. Masses are float32 sums over these in their order.
    """
    count, top_k, top_p = values.shape[1], inputs.top_k, inputs.top_p
    ranks = jnp.arange(count, dtype=jnp.int32)[None, :]
    num_top_k = jnp.where((top_k > 0) & (top_k < count), top_k, count)
    # Not the difference where the likeliest is infinite: it would be NaN.
    first = values[:, :1]
    weights = jnp.where(values == first, 1.0, jnp.exp(values - first))
    mass = jnp.cumsum(jnp.where(ranks < num_top_k[:, None], weights, 0.0), axis=1)
    num_top_p = 1 + jnp.sum(mass < top_p[:, None] * mass[:, -1:], axis=1, dtype=jnp.int32)
    # Rounding may let the mass of a whole row get there early: 1 is no test.
    num_kept = jnp.minimum(num_top_k, jnp.where(top_p < 1.0, num_top_p, count))
    last = (num_kept - 1)[:, None]
    logit = jnp.take_along_axis(values, last, axis=1)[:, 0]
    return LastKept(logit, jnp.take_along_axis(ids, last, axis=1)[:, 0])


def _mask_behind(
    logits: Float[Array, "n vocab"], last: LastKept, is_on: Bool[Array, " n"]
) -> Float[Array, "n vocab"]:
    """`logits` with -inf behind each row's last kept id, in rows where `is_on`."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    logit, last_id = last.logit[:, None], last.id[:, None]
    is_behind = (logits < logit) | ((logits == logit) & (ids > last_id))  # no NaN is
    return jnp.where(is_behind & is_on[:, None], -jnp.inf, logits)
