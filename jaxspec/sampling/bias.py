"""Logit bias, allowed token ids, bad words and additional stop ids, read from the bias tables."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.sampling.automata import Automata
from jaxspec.sampling.bias_tables import BiasTables
from jaxspec.sampling.bits import is_set
from jaxspec.sampling.logits_processors import newest_tokens
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs


def add_bias(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Add each id's bias to `logits` (float32), and mask ids that are not allowed with -inf.

    They are those that `allowed_token_ids` or a grammar excludes. `inputs.grammar_states` are the
    states of each row's automaton, by position of the verify.

    Raises:
        ValueError: the inputs have no tables.
    """
    tables = _tables_of(inputs)
    verify_position = positions - inputs.num_computed - 1
    state = jnp.take_along_axis(inputs.grammar_states, verify_position[:, None], axis=1)[:, 0]
    masks = tables.masks_at(inputs.table_slot, verify_position)
    masks &= _automata_of(inputs).masks_of(state)
    # XLA would fuse the gathers into the pass over all logits, and index them for each id.
    is_allowed = is_set(lax.optimization_barrier(masks), logits.shape[1])
    return jnp.where(is_allowed, logits + tables.bias[inputs.table_slot], -jnp.inf)


def more_forbidden_ids(
    inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Int[Array, "n forbidden"]:
    """Return the ids (int32) that the tables forbid at `positions`, padded with -1.

    These are the last ids of bad words whose other ids are the newest output, and stop ids below
    the minimum length.

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
    """Return the output tokens (int32) before `positions`, with which a bad word may begin.

    Entries that would lie in the prompt are -1.
    """
    count = tables.bad_words.shape[2] - 1
    newest, index = newest_tokens(tables.recent, inputs, positions, count)
    return jnp.where(index >= inputs.prompt_len[:, None], newest, NO_TOKEN)


def _automata_of(inputs: SamplingInputs) -> Automata:
    assert inputs.tables is not None and inputs.tables.automata is not None  # as biases
    return inputs.tables.automata


def _tables_of(inputs: SamplingInputs) -> BiasTables:
    if inputs.tables is None or inputs.tables.bias is None:
        raise ValueError("A bias must have its tables. This is a bug in jaxspec.")
    return inputs.tables.bias
