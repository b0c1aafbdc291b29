"""Slot mapping: the slot of the paged KV cache where each token of the step is written."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.pallas import dispatch
from jaxspec.regions import NO_SLOT


def slot_mapping(
    page_tables: Int[Array, "slots pages"],
    slots: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    live: Bool[Array, " tokens"],
    *,
    page_size: int,
) -> Int[Array, " tokens"]:
    """Return the KV slot of each token, `page * page_size + offset`, or -1 if it has none.

    `slots[t]` is the state slot that owns token `t`: its row in `page_tables`. A token has no KV
    slot if it is not `live`, its state slot is null or out of range, its position is outside the
    page table, or its page is the null page. All indices are int32.

    This runs on the device because the true positions exist only there: the host plans the step as
    if every draft in flight were accepted.
    """
    # One number per token, as in vLLM, which the writers divide by the constant page size. A pair
    # (page, offset) would cost a second store here and a second load in every block that writes.
    if dispatch.runs_kernel("slot_mapping", None, rows=positions.shape[0]):
        from jaxspec.pallas.paging.slot_mapping_kernel import slot_mapping_kernel

        return slot_mapping_kernel(page_tables, slots, positions, live, page_size=page_size)
    return slot_mapping_reference(page_tables, slots, positions, live, page_size=page_size)


def slot_mapping_reference(page_tables, slots, positions, live, *, page_size):
    """Reference for `slot_mapping`.

    With pages of 16, position 37 is offset 5 of its request's page 2. If entry 2 of the page table
    is page 7, the KV slot is `7 * 16 + 5 = 117`.
    """
    num_slots, num_pages = page_tables.shape
    index, offset = positions // page_size, positions % page_size
    known = (slots > 0) & (slots < num_slots) & (positions >= 0) & (index < num_pages)
    row = jnp.clip(slots, 0, num_slots - 1)
    page = page_tables[row, jnp.clip(index, 0, num_pages - 1)]
    return jnp.where(live & known & (page > 0), page * page_size + offset, NO_SLOT)
