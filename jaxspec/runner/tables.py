"""Updates of the sampling tables by a step: prompt chunks before verify, other tokens after it."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.regions import owner_of
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.prepare import StepInputs
from jaxspec.sampling import Acceptance
from jaxspec.sampling.tables import SamplingTables


def with_chunks(tables: SamplingTables, inputs: StepInputs) -> SamplingTables:
    """Add the step's chunks to the tables, so that tokens at prompt ends are sampled with them.

    The first chunk of a request clears the entries of the slot's previous request.
    """
    prefill = inputs.model.prefill
    if prefill is None or tables.is_empty:
        return tables
    _, tokens = inputs.places.split_tokens(inputs.model.tokens)
    _, positions = inputs.places.split_tokens(inputs.model.positions)
    _, rows = inputs.places.split_rows(inputs.active)
    token = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    seq = owner_of(token, prefill.query_start[1:])
    is_real = token < prefill.query_start[-1]
    seq = jnp.where(is_real, seq, 0)
    seen, bias = tables.seen, tables.bias
    if seen is not None:
        begins = (prefill.query_len > 0) & (prefill.num_computed == 0)
        seen = seen.cleared(jnp.where(begins, rows.slot, seen.counts.shape[0]))
        is_prompt = positions < rows.prompt_len[seq]
        seen = seen.with_tokens(rows.slot[seq], tokens, is_prompt, is_real)
    if bias is not None:
        is_new = is_real & (token >= prefill.query_start[1:][seq] - bias.recent.shape[1])
        slots = jnp.where(is_new, rows.table_slot[seq], 0)
        bias = bias.with_tokens(slots, tokens, positions)
    return dataclasses.replace(tables, seen=seen, bias=bias)


def with_verified(
    tables: SamplingTables, inputs: StepInputs, acceptance: Acceptance
) -> SamplingTables:
    """Add the tokens made valid by the verify step: input tokens and accepted drafts."""
    if tables.is_empty:
        return tables
    rows, _ = inputs.places.split_rows(inputs.active)
    num_valid, _ = inputs.places.split_rows(acceptance.num_emitted)
    width = inputs.places.width
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_true = (place < num_valid[:, None]).reshape(-1)
    index = rows.num_computed[:, None] + place
    tokens = step_tokens(inputs).reshape(-1)
    seen, bias = tables.seen, tables.bias
    if seen is not None:
        is_prompt = (index < rows.prompt_len[:, None]).reshape(-1)
        slots = jnp.repeat(rows.slot, width)
        seen = seen.with_tokens(slots, tokens, is_prompt, is_true)
    if bias is not None:
        slots = jnp.where(is_true, jnp.repeat(rows.table_slot, width), 0)
        bias = bias.with_tokens(slots, tokens, index.reshape(-1))
    return dataclasses.replace(tables, seen=seen, bias=bias)


def grammar_states(
    inputs: StepInputs, tables: SamplingTables
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the states of automata by position: of decode rows `[rows, width]`, of chunk ends."""
    decode, ends = inputs.places.split_rows(inputs.active)
    if tables.automata is None:
        return {}, {}
    along = tables.automata.along(decode.grammar_state, inputs.drafts)
    return {"grammar_states": along}, {"grammar_states": ends.grammar_state[:, None]}


def grammar_state_after(
    inputs: StepInputs, tables: SamplingTables, acceptance: Acceptance
) -> dict[str, Array]:
    """Return the row field with the automaton's state after the emitted tokens, by active row."""
    if tables.automata is None:
        return {}
    state = tables.automata.along(inputs.active.grammar_state, acceptance.tokens)[:, -1]
    return {"grammar_state": state}


def step_tokens(inputs: StepInputs) -> Int[Array, "rows width"]:
    """Return the rectangle's tokens (int32): the last token of each row, then its drafts."""
    rows, _ = inputs.places.split_rows(inputs.active)
    return jnp.concatenate([rows.last_token[:, None], inputs.drafts], axis=1)


def stop_ids(tables: SamplingTables, rows: BatchState) -> Int[Array, "rows stops"]:
    """Return all stop ids (int32) of each row, padded with -1."""
    if tables.bias is None:
        return rows.stop_ids
    more = tables.bias.more_stop_ids[rows.table_slot]
    return jnp.concatenate([rows.stop_ids, more], axis=1)
