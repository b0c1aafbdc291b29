"""Logits processors, their order, and the ids that a request forbids."""

import functools
from typing import Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.matmul.scores import has_argmax, mask_columns
from jaxspec.requests.sampling_features import (
    BIAS,
    MIN_P,
    PENALTIES,
    SMALL_TOP_K,
    TEMPERATURE,
    TOP_K_TOP_P,
    SamplingFeatures,
)
from jaxspec.sampling.bias import add_bias, more_forbidden_ids
from jaxspec.sampling.logits_processors import apply_processors
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs
from jaxspec.sampling.penalties import has_penalty, penalize
from jaxspec.sampling.top_k_top_p import mask_small_top_k, mask_top_k_top_p


class Processor(Protocol):
    """Pure function of rows of logits; all of them are in `PROCESSORS`.

    `SamplingParams.features` names those that a request needs. A program applies a processor to all
    rows if one may need it, so it must leave the logits of every other row bitwise unchanged, and
    keep NaNs. A greedy row must keep its largest logit, unless the processor's purpose is to change
    it.
    """

    def __call__(
        self,
        logits: Float[Array, "n vocab"],
        inputs: SamplingInputs,
        positions: Int[Array, " n"],
        /,
    ) -> Float[Array, "n vocab"]:
        """Return new logits (float32).

        `positions` (int32) is the index in its request of each token to draw.
        """
        ...


def process_logits(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    *,
    features: SamplingFeatures,
) -> Float[Array, "n vocab"]:
    """Return the logits (float32) of the distribution that a token is drawn from.

    Applies `adjusted_logits`, then the other processors of `features` in the order of `PROCESSORS`.
    `positions` (int32) is the index in its request of the token to draw.
    """
    logits = adjusted_logits(logits, inputs, positions, features=features)
    for name in cuts(features):
        logits = PROCESSORS[name](logits, inputs, positions)
    return logits


def adjusted_logits(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    *,
    features: SamplingFeatures,
) -> Float[Array, "n vocab"]:
    """Apply biases, users' processors, penalties and temperature (float32); mask forbidden ids.

    Penalties and temperature keep finite logits finite. Users' processors may return NaN or -inf,
    which `has_choice` sees, because it applies them too: it is `has_argmax` of this result.
    """
    logits = logits.astype(jnp.float32)
    scale = functools.partial(_scaled, logits, inputs, positions)
    without_tables = features.without(BIAS).without(PENALTIES)
    if without_tables == features or not len(logits):
        scaled = scale(features)
    else:
        # The pass over the logits reads the tables only where a row needs it.
        is_needed = jnp.any(_reads_tables(inputs, features))
        scaled = lax.cond(is_needed, lambda: scale(features), lambda: scale(without_tables))
    forbidden = forbidden_ids(inputs, positions)
    if BIAS in features:
        forbidden = jnp.concatenate([forbidden, more_forbidden_ids(inputs, positions)], axis=1)
    # Penalties and temperature keep -inf, so the scatter can be the last step, in place on an array
    # made here. The model's logits, which logprobs read again, would have to be copied for it.
    return mask_columns(scaled, forbidden)


def _reads_tables(inputs: SamplingInputs, features: SamplingFeatures) -> Bool[Array, " n"]:
    """Return the rows that a bias, a grammar, a user's processor or a penalty changes."""
    reads = jnp.zeros_like(inputs.is_greedy)
    if BIAS in features:
        reads |= (inputs.table_slot > 0) | jnp.any(inputs.grammar_states != 0, axis=1)
    return reads | has_penalty(inputs) if PENALTIES in features else reads


def _scaled(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    features: SamplingFeatures,
) -> Float[Array, "n vocab"]:
    if BIAS in features:
        logits = apply_processors(add_bias(logits, inputs, positions), inputs, positions)
    scaled = logits
    for name in (PENALTIES, TEMPERATURE):
        if name in features:
            scaled = PROCESSORS[name](scaled, inputs, positions)
    if scaled is logits:
        return logits
    most = jnp.finfo(jnp.float32).max
    return jnp.where(jnp.isfinite(logits), jnp.clip(scaled, -most, most), scaled)


def cuts(features: SamplingFeatures) -> list[str]:
    """Return the names of the processors that follow `adjusted_logits`, in their order."""
    names = set(features.processors) - {BIAS, PENALTIES, TEMPERATURE}
    return sorted(names, key=list(PROCESSORS).index)


def forbidden_ids(inputs: SamplingInputs, positions: Int[Array, " n"]) -> Int[Array, "n stops"]:
    """Return the row's stop ids (int32) where `positions < min_len` (min_tokens); else -1."""
    return jnp.where((positions < inputs.min_len)[:, None], inputs.stop_ids, NO_TOKEN)


def has_choice(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    *,
    features: SamplingFeatures,
) -> Bool[Array, " n"]:
    """Return the rows that can draw a token: no NaN, and some finite logit is allowed.

    `logits` are the raw ones; forbidden ids do not count. Top-k and top-p are not applied: after
    them, a forced token (+inf) would leave no finite logit.
    """
    return has_argmax(adjusted_logits(logits, inputs, positions, features=features))


def scale_by_temperature(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Return `logits / temperature`; greedy rows are unchanged."""
    return logits / jnp.where(inputs.is_greedy, 1.0, inputs.temperature)[:, None]


def mask_min_p(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Mask tokens (-inf) that are less than `min_p` times as likely as the likeliest one.

    The likeliest token is always kept. Rows whose `min_p` is 0 are unchanged.
    """
    # log(0) is -inf, which masks nothing.
    least = jnp.max(logits, axis=1) + jnp.log(inputs.min_p)
    return jnp.where(logits < least[:, None], -jnp.inf, logits)


# In the order of vLLM. The keys are names of `SamplingFeatures`.
PROCESSORS: dict[str, Processor] = {
    BIAS: add_bias,
    PENALTIES: penalize,
    TEMPERATURE: scale_by_temperature,
    MIN_P: mask_min_p,
    SMALL_TOP_K: mask_small_top_k,
    TOP_K_TOP_P: mask_top_k_top_p,
}
