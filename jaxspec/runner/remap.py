"""Remap: move each request's row from its position in the last plan to that in this plan.

Also adds new rows and their pages to the state.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.device_plan import DevicePlan


def remap(
    state: BatchState, prev_positions: Int[Array, " rows"], new_rows: BatchState
) -> BatchState:
    """Return rows of which row i is `state[prev_positions[i]]`, or `new_rows[i]` if negative.

    Rows move only here, all fields together, once per plan. A field left in place, or moved twice,
    would combine the row with another request's recurrent state.

        state            a  b  c          a and b finished, c moves up, d is new
        prev_positions   2 -1 -1
        new_rows         .  d  0
        result           c  d  0
    """
    moved = state.fields.at[jnp.maximum(prev_positions, 0)].get(mode="clip")
    stays = (prev_positions >= 0)[:, None]
    return BatchState(jnp.where(stays, moved, new_rows.fields))


def scatter_new_rows(index: Int[Array, " new"], entries: BatchState, num_rows: int) -> BatchState:
    """Return `num_rows` empty rows with `entries` at `index`; negative indices are padding."""
    target = jnp.where(index < 0, num_rows, index)
    nothing = jnp.zeros((num_rows, entries.fields.shape[1]), jnp.int32)
    return BatchState(nothing).put(target, entries)


def update_page_tables(
    page_tables: Int[Array, "slots pages"], new_rows: BatchState, plan: DevicePlan
) -> Int[Array, "slots pages"]:
    """Clear the page tables of new requests' slots, and append this plan's pages."""
    num_slots = page_tables.shape[0]
    reset = jnp.where(new_rows.slot > 0, new_rows.slot, num_slots)
    page_tables = page_tables.at[reset].set(0, mode="drop")
    slots = jnp.where(plan.append_slots > 0, plan.append_slots, num_slots)
    return page_tables.at[slots, plan.append_indices].set(plan.append_pages, mode="drop")


def write_page_tables(
    page_tables: Int[Array, "slots pages"], plan: DevicePlan
) -> Int[Array, "slots pages"]:
    """Overwrite the page tables of the target slots of a plan of moves."""
    slots = jnp.where(plan.target_slots > 0, plan.target_slots, page_tables.shape[0])
    return page_tables.at[slots].set(plan.target_tables, mode="drop")
