"""Drawing from a large vocabulary under min-p, top-k and top-p, without masking all logits.

A small top-k leaves few ids, and only those get noise. The other rows first draw without top-k and
top-p: if these keep the token, it is the result. Only the remaining rows search for the last kept
id and draw a second time, with the same noise. With a top-p of 0.9, that is a tenth of them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.selection import LastKept, best_noisy, sums_above
from jaxspec.pallas.selection.noise import RowKeys, gumbel, random_bits
from jaxspec.requests.sampling_features import MAX_SMALL_TOP_K, MIN_P, SMALL_TOP_K, TOP_K_TOP_P
from jaxspec.sampling.candidates import largest
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.top_k_top_p import Ordered, has_small_top_k, last_in_large

CUTS = frozenset({MIN_P, SMALL_TOP_K, TOP_K_TOP_P})
"""Names of the processors that `draw_kept` implements."""


def draw_kept(
    scores: Float[Array, "n vocab"], inputs: SamplingInputs, keys: RowKeys, names: frozenset[str]
) -> Int[Array, " n"]:
    """Return the token (int32) that `best_noisy` would choose after the processors `names`.

    Args:
        scores: `adjusted_logits` (float32), of more than `MAX_SORTED` ids.
        inputs: sampling parameters of the rows.
        keys: key of each row's noise.
        names: a subset of `CUTS`.
    """
    few, floor = Ordered(*largest(scores, MAX_SMALL_TOP_K)), jnp.full(len(scores), -jnp.inf)
    if MIN_P in names:
        floor = few.logits[:, 0] + jnp.log(inputs.min_p)  # as in `mask_min_p`
        few = few._replace(logits=jnp.where(few.logits < floor[:, None], -jnp.inf, few.logits))
    is_small = inputs.is_greedy
    if names & {SMALL_TOP_K, TOP_K_TOP_P}:
        is_small |= has_small_top_k(inputs)
    is_noisy, whole = ~inputs.is_greedy, LastKept.none(len(scores))._replace(logit=floor)
    tokens = best_noisy(scores, keys, is_noisy, whole, ~is_small)
    if TOP_K_TOP_P in names:
        is_cut = ~is_small & (_has_top_k(scores, inputs) | (inputs.top_p < 1.0))

        def search():
            is_open = is_cut & ~_keeps(scores, inputs, few, floor, tokens, is_cut)
            last = last_in_large(scores, few, inputs.top_k, inputs.top_p, is_open, floor)
            last = last.where(last.logit >= floor, whole)
            return jnp.where(is_open, best_noisy(scores, keys, is_noisy, last, is_open), tokens)

        tokens = lax.cond(jnp.any(is_cut), search, lambda: tokens)
    return jnp.where(is_small, _draw_from_few(few, inputs, keys), tokens)


def _has_top_k(scores: Float[Array, "n vocab"], inputs: SamplingInputs) -> Bool[Array, " n"]:
    return (inputs.top_k > 0) & (inputs.top_k < scores.shape[1])


def _draw_from_few(few: Ordered, inputs: SamplingInputs, keys: RowKeys) -> Int[Array, " n"]:
    num_kept = few.num_kept(inputs.top_k, inputs.top_p)
    num_kept = jnp.where(inputs.is_greedy, 1, num_kept)  # the likeliest id
    is_kept = jnp.arange(few.ids.shape[1], dtype=jnp.int32)[None, :] < num_kept[:, None]
    keys = RowKeys(*(key[:, None] for key in keys))
    noise = gumbel(random_bits(keys, few.ids.astype(jnp.uint32)))
    noisy = jnp.where(is_kept, few.logits + noise, -jnp.inf)
    best = jnp.max(noisy, axis=1, keepdims=True)
    lowest = jnp.iinfo(jnp.int32).max
    return jnp.min(jnp.where(is_kept & (noisy == best), few.ids, lowest), axis=1)


def _keeps(
    scores: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    few: Ordered,
    floor: Float[Array, " n"],
    tokens: Int[Array, " n"],
    wanted: Bool[Array, " n"],
) -> Bool[Array, " n"]:
    """Return the `wanted` rows whose token is certainly kept; False if top-k and top-p are on.

    A token is kept if the count (top-k) or mass (top-p) of all logits at or above its own is below
    the limit. The last kept logit may fail this test.
    """
    has_top_k = _has_top_k(scores, inputs)
    is_searched = wanted & (has_top_k ^ (inputs.top_p < 1.0))
    own = jnp.take_along_axis(scores, tokens[:, None], axis=1)
    limits = jnp.concatenate([own, floor[:, None]], axis=1)
    sums = sums_above(scores, few.logits[:, 0], limits, has_top_k, is_searched).sum(axis=1)
    is_before = jnp.where(
        has_top_k,
        sums[:, 0] <= inputs.top_k.astype(jnp.float32),
        sums[:, 0] < inputs.top_p * sums[:, 1],
    )
    return is_searched & is_before
