"""Remap: each request's row follows it from where the last plan had it to where this one has it."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.device_plan import DevicePlan


def remap(
    state: BatchState, prev_positions: Int[Array, " rows"], new_rows: BatchState
) -> BatchState:
    """Every field of row i is `state[prev_positions[i]]`, or `new_rows[i]` where that is negative.

    Nothing else moves rows, and it happens once a step: a count that were gathered twice, or a row
    that kept what its last owner left there, would pick another request's recurrent state.

        state            a  b  c          two requests left, c moved up, d is new
        prev_positions   2 -1 -1
        new_rows         .  d  0
        result           c  d  0
    """
    moved = state.fields.at[jnp.maximum(prev_positions, 0)].get(mode="clip")
    stays = (prev_positions >= 0)[:, None]
    return BatchState(jnp.where(stays, moved, new_rows.fields))


def scatter_new_rows(index: Int[Array, " new"], entries: BatchState, num_rows: int) -> BatchState:
    """`num_rows` rows, empty but for `entries` at `index`; a negative index is padding."""
    target = jnp.where(index < 0, num_rows, index)
    nothing = jnp.zeros((num_rows, entries.fields.shape[1]), jnp.int32)
    return BatchState(nothing).put(target, entries)


def update_page_tables(
    page_tables: Int[Array, "slots pages"], new_rows: BatchState, plan: DevicePlan
) -> Int[Array, "slots pages"]:
    """The tables with the slots of new requests emptied and this plan's pages appended."""
    num_slots = page_tables.shape[0]
    reset = jnp.where(new_rows.slot > 0, new_rows.slot, num_slots)
    page_tables = page_tables.at[reset].set(0, mode="drop")
    slots = jnp.where(plan.append_slots > 0, plan.append_slots, num_slots)
    return page_tables.at[slots, plan.append_indices].set(plan.append_pages, mode="drop")


def write_page_tables(
    page_tables: Int[Array, "slots pages"], plan: DevicePlan
) -> Int[Array, "slots pages"]:
    """The tables with the whole rows that a plan of moves brings for its target slots."""
    slots = jnp.where(plan.target_slots > 0, plan.target_slots, page_tables.shape[0])
    return page_tables.at[slots].set(plan.target_tables, mode="drop")
