"""What a request forbids and favours: logit_bias, allowed_token_ids, bad_words, many stop ids."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.sampling.bias_tables import BiasTables
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs


def add_bias(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Return `logits` (float32) plus the bias of each id; -inf outside `allowed_token_ids`.

    Raises:
        ValueError: the inputs have no tables.
    """
    bias = _tables_of(inputs).bias[inputs.table_slot]
    return jnp.where(bias == -jnp.inf, -jnp.inf, logits + bias)


def more_forbidden_ids(
    inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Int[Array, "n forbidden"]:
    """Return the ids (int32) that the tables forbid at `positions`, and -1.

    These are the ends of bad words whose beginning is the newest output, and stop ids below the
    minimum length.

    Raises:
        ValueError: the inputs have no tables.
    """
    tables = _tables_of(inputs)
    stop_ids = tables.more_stop_ids[inputs.table_slot]
    is_early = (positions < inputs.min_len)[:, None]
    ends = tables.ends_of_bad_words(inputs.table_slot, _newest_output(tables, inputs, positions))
    return jnp.concatenate([jnp.where(is_early, stop_ids, NO_TOKEN), ends], axis=1)


def _newest_output(
    tables: BiasTables, inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Int[Array, "n prefix"]:
    """The tokens (int32) in front of `positions` that a bad word may begin with; -1: no output."""
    length = tables.recent.shape[1]
    index = positions[:, None] - jnp.arange(length - 1, 0, -1, dtype=jnp.int32)[None, :]
    newest = jnp.take_along_axis(tables.recent[inputs.table_slot], index % length, axis=1)
    width = 0 if inputs.tokens is None else inputs.tokens.shape[1]
    if inputs.tokens is not None and width:
        place = index - inputs.num_computed[:, None]
        of_step = jnp.take_along_axis(inputs.tokens, jnp.clip(place, 0, width - 1), axis=1)
        newest = jnp.where(place >= 0, of_step, newest)
    return jnp.where(index >= inputs.prompt_len[:, None], newest, NO_TOKEN)


def _tables_of(inputs: SamplingInputs) -> BiasTables:
    if inputs.tables is None or inputs.tables.bias is None:
        raise ValueError("A bias must have its tables. This is a bug in jaxspec.")
    return inputs.tables.bias
