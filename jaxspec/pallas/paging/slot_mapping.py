"""Slot mapping: where in the paged KV cache each token of the step is written."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.pallas import dispatch

NO_SLOT = -1  # the keys and values of this token are written nowhere


def slot_mapping(
    page_tables: Int[Array, "slots pages"],
    slots: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    live: Bool[Array, " tokens"],
    *,
    page_size: int,
) -> Int[Array, " tokens"]:
    """The KV slot of each token, `page * page_size + offset`; -1 for a token that has none.

    `slots[t]` is the request slot that owns token `t`, its row in `page_tables`. A token has no KV
    slot when it is not `live`, its request slot is null or out of range, its position lies outside
    the page table, or the page there is the null page. All int32.

    The device computes this because only it knows the true positions: the host planned the step
    assuming that every draft in flight is accepted.
    """
    if dispatch.runs_kernel("slot_mapping", None):
        return _slot_mapping_kernel(page_tables, slots, positions, live, page_size=page_size)
    return slot_mapping_reference(page_tables, slots, positions, live, page_size=page_size)


def slot_mapping_reference(
    page_tables: Int[Array, "slots pages"],
    slots: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    live: Bool[Array, " tokens"],
    *,
    page_size: int,
) -> Int[Array, " tokens"]:
    """The specification of `slot_mapping`, in plain JAX.

    A token at position 37 with pages of 16 sits in its request's page 2 at offset 5. If
    the page table says that page is number 7, its slot is `7 * 16 + 5 = 117`.
    """
    num_slots, num_pages = page_tables.shape
    index, offset = positions // page_size, positions % page_size
    known = (slots > 0) & (slots < num_slots) & (positions >= 0) & (index < num_pages)
    row = jnp.clip(slots, 0, num_slots - 1)
    page = page_tables[row, jnp.clip(index, 0, num_pages - 1)]
    return jnp.where(live & known & (page > 0), page * page_size + offset, NO_SLOT)


_TOKENS = 4  # of a block; 2 and 8 measure alike


@functools.partial(jax.jit, static_argnames=("page_size", "interpret"))
def _slot_mapping_kernel(page_tables, slots, positions, live, *, page_size, interpret=None):
    """`slot_mapping` on a Hopper GPU. Mosaic GPU has no gather: a block does a few tokens' reads.

    A call takes 1.7 us for 256 or 2048 tokens and 2.0 for 4, of XLA 2.1 and 1.9.
    `interpret`: parameters of Mosaic's interpreter.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_slots, num_pages = page_tables.shape
    (num_tokens,) = slots.shape

    def body(page_tables, slots, positions, live, out):
        first = lax.axis_index("block") * _TOKENS
        # The last block's tokens that are not there repeat the last one.
        tokens = [jnp.minimum(first + i, num_tokens - 1) for i in range(_TOKENS)]
        read = [(slots[token], positions[token], live[token]) for token in tokens]
        # All pages before the first store, so that the chains run side by side.
        indices = [lax.div(jnp.maximum(position, 0), page_size) for _, position, _ in read]
        pages = [
            page_tables[jnp.clip(slot, 0, num_slots - 1), jnp.minimum(index, num_pages - 1)]
            for (slot, _, _), index in zip(read, indices, strict=True)
        ]
        for i, (slot, position, is_live) in enumerate(read):
            known = (slot > 0) & (slot < num_slots) & (position >= 0) & (indices[i] < num_pages)
            kv_slot = pages[i] * page_size + position - indices[i] * page_size
            out[tokens[i]] = jnp.where(is_live & known & (pages[i] > 0), kv_slot, NO_SLOT)

    kernel = plgpu.kernel(
        body,
        kernel_name="slot_mapping",
        out_type=jax.ShapeDtypeStruct(slots.shape, jnp.int32),
        grid=(pl.cdiv(num_tokens, _TOKENS),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(page_tables, slots, positions, live)
