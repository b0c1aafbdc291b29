"""Logits to logits: what a request forbids becomes -inf, and temperature flattens the rest."""

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.matmul.scores import has_argmax, mask_columns
from jaxspec.sampler import (
    BIAS,
    MIN_P,
    PENALTIES,
    SMALL_TOP_K,
    TEMPERATURE,
    TOP_K_TOP_P,
    Sampler,
)
from jaxspec.sampling.bias import add_bias, more_forbidden_ids
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs
from jaxspec.sampling.penalties import penalize
from jaxspec.sampling.top_k_top_p import mask_small_top_k, mask_top_k_top_p


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
    """Return logits (float32) of the distribution that a token is drawn from.

    `adjusted_logits`, then the sampler's other processors in the order of `PROCESSORS`.
    `positions` (int32) is the index in its request of the token to draw.
    """
    logits = adjusted_logits(logits, inputs, positions, sampler=sampler)
    for name in cuts(sampler):
        logits = PROCESSORS[name](logits, inputs, positions)
    return logits


def adjusted_logits(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    *,
    sampler: Sampler,
) -> Float[Array, "n vocab"]:
    """Return logits (float32) with biases, penalties and temperature, and -inf for forbidden ids.

    A finite logit stays finite, so `has_argmax` says whether the row can be drawn from.
    """
    logits = logits.astype(jnp.float32)
    if BIAS in sampler:
        logits = add_bias(logits, inputs, positions)
    scaled = logits
    for name in (PENALTIES, TEMPERATURE):
        if name in sampler:
            scaled = PROCESSORS[name](scaled, inputs, positions)
    if scaled is not logits:
        most = jnp.finfo(jnp.float32).max
        scaled = jnp.where(jnp.isfinite(logits), jnp.clip(scaled, -most, most), scaled)
    forbidden = forbidden_ids(inputs, positions)
    if BIAS in sampler:
        forbidden = jnp.concatenate([forbidden, more_forbidden_ids(inputs, positions)], axis=1)
    # Penalties and temperature leave -inf as it is, so the scatter may come last: it overwrites
    # what was made here. In the model's logits, which logprobs read again, it would make a copy.
    return mask_columns(scaled, forbidden)


def cuts(sampler: Sampler) -> list[str]:
    """Return the names of the processors that follow `adjusted_logits`, in their order."""
    names = set(sampler.processors) - {BIAS, PENALTIES, TEMPERATURE}
    return sorted(names, key=list(PROCESSORS).index)


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
    forced token (+inf) stands alone among -inf, so those are not looked at.
    """
    return has_argmax(adjusted_logits(logits, inputs, positions, sampler=sampler))


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


# In vLLM's order. Their names are what a `Sampler` holds and `SamplingParams.sampler` asks for.
PROCESSORS: dict[str, LogitsProcessor] = {
    BIAS: add_bias,
    PENALTIES: penalize,
    TEMPERATURE: scale_by_temperature,
    MIN_P: mask_min_p,
    SMALL_TOP_K: mask_small_top_k,
    TOP_K_TOP_P: mask_top_k_top_p,
}
