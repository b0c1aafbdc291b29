"""Application of users' logits processors to rows of logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.requests.logits_processors import LogitsProcessor, Prefix
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs
from jaxspec.sampling.processor_tables import ProcessorTables


def apply_processors(
    logits: Float[Array, "n vocab"], inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Float[Array, "n vocab"]:
    """Apply the processors that each row uses, in their order, to `logits` (float32).

    The prefix of a row of logits is the tokens in the tables, then the step's tokens before its
    position, drafts included. Masked ids stay masked and NaNs stay, so an invalid row still ends
    with an error. An engine without processors has no tables, and nothing is computed.
    """
    if inputs.tables is None or inputs.tables.processors is None:
        return logits
    tables = inputs.tables.processors
    used, params, start = tables.used[inputs.table_slot], _params_of(tables, inputs), 0
    for number, processor in enumerate(tables.processors):
        end = start + len(processor.params)
        own = dict(zip(processor.params, params[:, start:end].T, strict=True))
        start = end
        changed = jax.vmap(processor)(logits, _prefix(processor, inputs, positions), own)
        is_used = (used >> number & 1)[:, None] == 1
        is_fixed = jnp.isneginf(logits) | jnp.isnan(logits)
        logits = jnp.where(is_used & ~is_fixed, changed, logits)
    return logits


def _params_of(tables: ProcessorTables, inputs: SamplingInputs) -> Float[Array, "n params"]:
    return tables.params[inputs.table_slot]


def _prefix(
    processor: LogitsProcessor, inputs: SamplingInputs, positions: Int[Array, " n"]
) -> Prefix:
    assert inputs.tables is not None and inputs.tables.bias is not None  # as processors
    recent = inputs.tables.bias.recent
    newest, index = newest_tokens(recent, inputs, positions, processor.window)
    ids = jnp.where(index >= 0, newest, NO_TOKEN)
    return Prefix(ids, positions, jnp.broadcast_to(inputs.prompt_len, positions.shape))


def newest_tokens(
    recent: Int[Array, "slots length"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    count: int,
) -> tuple[Int[Array, "n count"], Int[Array, "n count"]]:
    """Return the last `count` tokens before each position, and their indices in the request.

    `recent` has the tokens of each slot before those of the step, token `i` at `i % length`.
    Entries of negative indices are arbitrary.
    """
    length = recent.shape[1]
    index = positions[:, None] - jnp.arange(count, 0, -1, dtype=jnp.int32)[None, :]
    newest = jnp.take_along_axis(recent[inputs.table_slot], index % length, axis=1)
    width = 0 if inputs.tokens is None else inputs.tokens.shape[1]
    if inputs.tokens is not None and width:
        verify_position = index - inputs.num_computed[:, None]
        known = jnp.clip(verify_position, 0, width - 1)
        of_step = jnp.take_along_axis(inputs.tokens, known, axis=1)
        newest = jnp.where(verify_position >= 0, of_step, newest)
    return newest, index
