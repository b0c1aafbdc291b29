"""Logits to logits: what a request forbids becomes -inf, and temperature flattens the rest."""

from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.matmul.scores import has_argmax, mask_columns
from jaxspec.sampler import BIAS, MIN_P, PENALTIES, TEMPERATURE, TOP_K_TOP_P, Sampler
from jaxspec.sampling.bias import add_bias
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs
from jaxspec.sampling.penalties import penalize


class LogitsProcessor(Protocol):
    """A pure function of the rows' logits; `PROCESSORS` lists all.

    `SamplingParams.sampler` says which requests want it. A program has it if one of its rows may
    want it, so it must leave the logits of every other row bit for bit as they were, and a NaN a
    NaN. A greedy row must keep its largest logit, unless the processor is there to change it.
    """

    def __call__(
        self,
        logits: Float[Array, "n vocab"],
        inputs: SamplingInputs,
        positions: Int[Array, " n"],
        /,
    ) -> Float[Array, "n vocab"]:
        """New logits (float32). `positions` (int32): the index in its request of each token."""
        ...


def process_logits(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    *,
    sampler: Sampler,
) -> Float[Array, "n vocab"]:
    """Logits (float32) of the distribution a token is drawn from.

    Stop ids below the minimum length are forbidden first; the sampler's processors follow, in the
    order of `PROCESSORS`. `positions` (int32) is the index in its request of the token to draw.
    """
    logits = mask_stop_ids(logits.astype(jnp.float32), inputs, positions)
    for name in sorted(sampler.processors, key=list(PROCESSORS).index):
        logits = PROCESSORS[name](logits, inputs, positions)
    return logits


def forbidden_ids(inputs: SamplingInputs, positions: Int[Array, " n"]) -> Int[Array, "n stops"]:
    """The row's stop ids (int32) where `positions < min_len` (min_tokens); else -1."""
    return jnp.where((positions < inputs.min_len)[:, None], inputs.stop_ids, NO_TOKEN)


def mask_stop_ids(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """`logits` with -inf at the row's `forbidden_ids`."""
    return mask_columns(logits, forbidden_ids(inputs, positions))


def has_choice(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    *,
    sampler: Sampler,
) -> Bool[Array, " n"]:
    """Whether a token can be drawn: no NaN, and something finite is left to allow.

    `logits` are the raw ones, and what the row forbids counts as not there. After top-k and top-p a
    forced token (+inf) stands alone among -inf, and so does what is left of a row that overflowed.
    """
    allowed = mask_stop_ids(logits.astype(jnp.float32), inputs, positions)
    if BIAS in sampler:
        allowed = add_bias(allowed, inputs, positions)
    return has_argmax(allowed)


def scale_by_temperature(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """`logits / temperature`; greedy rows are left as they are."""
    return logits / jnp.where(inputs.is_greedy, 1.0, inputs.temperature)[:, None]


def mask_min_p(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """`logits` (float32) with -inf where a token is less than `min_p` times as likely as the best.

    The likeliest always stays, and so does every row in which `min_p` is 0.
    """
    # log(0) is -inf, below which nothing lies.
    least = jnp.max(logits, axis=1) + jnp.log(inputs.min_p)
    return jnp.where(logits < least[:, None], -jnp.inf, logits)


def mask_top_k_top_p(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """`logits` (float32) with -inf outside the `top_k` largest, then outside `top_p`.

    top-k keeps exactly k ids: of equal logits the lower ids, as a stable sort does. top-p
    (Holtzman et al. 2020, nucleus sampling) keeps the shortest run of the likeliest ids
    whose mass, renormalised after top-k, reaches `top_p`; the likeliest always stays.
    """
    vocab, top_k, top_p = logits.shape[1], inputs.top_k, inputs.top_p
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32)[None, :], logits.shape)
    negated, order = jax.lax.sort((-logits, ids), num_keys=1, is_stable=True)
    ranks = jnp.arange(vocab, dtype=jnp.int32)[None, :]

    num_top_k = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    ranked = jnp.where(ranks < num_top_k[:, None], -negated, -jnp.inf)
    mass = jnp.cumsum(jax.nn.softmax(ranked, axis=1), axis=1)
    num_top_p = 1 + jnp.sum(mass < top_p[:, None], axis=1, dtype=jnp.int32)
    # Rounding may keep the mass of a whole row below 1, or let it get there early: 1 is no test.
    num_kept = jnp.minimum(num_top_k, jnp.where(top_p < 1.0, num_top_p, vocab))

    # Equal logits are ordered by id, so the last one kept tells of each other id which side
    # it is on. That needs no scatter back, and nothing is below a NaN.
    last = (num_kept - 1)[:, None]
    cut = -jnp.take_along_axis(negated, last, axis=1)
    cut_id = jnp.take_along_axis(order, last, axis=1)
    is_cut = (logits < cut) | ((logits == cut) & (ids > cut_id))
    return jnp.where(is_cut, -jnp.inf, logits)


# In vLLM's order. Their names are what a `Sampler` holds and `SamplingParams.sampler` asks for.
PROCESSORS: dict[str, LogitsProcessor] = {
    BIAS: add_bias,
    PENALTIES: penalize,
    TEMPERATURE: scale_by_temperature,
    MIN_P: mask_min_p,
    TOP_K_TOP_P: mask_top_k_top_p,
}
