"""Repetition, frequency and presence penalties."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling.params import SamplingInputs


def penalize(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Apply repetition, frequency and presence penalties to `logits` (float32).

    For an id in the prompt or the output, a logit above 0 is divided by `repetition_penalty`, and
    one below is multiplied by it. Then `frequency_penalty` is subtracted once per occurrence in the
    output, and `presence_penalty` once (Keskar et al. 2019 and OpenAI's API; same order as vLLM).

    The tokens before a row are those counted in the tables and the step's tokens before its logits,
    drafts included.

    Raises:
        ValueError: the inputs have no counts.
    """
    if inputs.tables is None or inputs.tables.seen is None or inputs.tokens is None:
        raise ValueError("Penalties must have counts of tokens. This is a bug in jaxspec.")
    seen, ids = inputs.tables.seen, jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    # Rows without penalties read slot 0, which stays in L2; the others read 3 bytes per id.
    slot = jnp.where(has_penalty(inputs), inputs.slot, 0)
    in_prompt, counts = seen.in_prompt[slot], seen.counts[slot].astype(jnp.int32)
    # Comparisons, not a scatter: XLA fuses all of this into one pass over the logits.
    for place in range(inputs.tokens.shape[1]):
        is_token = ids == inputs.tokens[:, place, None]
        # A decode row may compute the last token of a prompt.
        is_prompt = (inputs.num_computed + place < inputs.prompt_len)[:, None]
        in_prompt |= is_token & is_prompt
        counts += (is_token & ~is_prompt).astype(jnp.int32)
    repetition = jnp.where(in_prompt | (counts > 0), inputs.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    logits -= inputs.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - jnp.where(counts > 0, inputs.presence_penalty[:, None], 0.0)


def has_penalty(inputs: SamplingInputs) -> Bool[Array, " n"]:
    """Return the rows whose request has a penalty."""
    is_repetition = inputs.repetition_penalty != 1.0
    return is_repetition | (inputs.frequency_penalty != 0.0) | (inputs.presence_penalty != 0.0)
