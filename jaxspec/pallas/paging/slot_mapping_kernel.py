"""Pallas (Mosaic GPU) kernel of `slot_mapping` for Hopper GPUs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.regions import NO_SLOT

_BLOCK_TOKENS = 4  # 2 and 8 are as fast


@functools.partial(jax.jit, static_argnames=("page_size", "interpret"))
def slot_mapping_kernel(page_tables, slots, positions, live, *, page_size, interpret=None):
    """Run `slot_mapping`; measurements are in benchmarks/results/kernels_h200.json.

    Mosaic GPU has no gather, so each block reads the page table entries of a few tokens one by one.
    """
    num_slots, num_pages = page_tables.shape
    (num_tokens,) = slots.shape

    def body(page_tables, slots, positions, live, out):
        first = lax.axis_index("block") * _BLOCK_TOKENS
        # The last block may have fewer tokens; it repeats the last one.
        tokens = [jnp.minimum(first + i, num_tokens - 1) for i in range(_BLOCK_TOKENS)]
        loaded = [(slots[token], positions[token], live[token]) for token in tokens]
        # All pages are read before the first store, so that the loads overlap.
        indices = [lax.div(jnp.maximum(position, 0), page_size) for _, position, _ in loaded]
        pages = [
            page_tables[jnp.clip(slot, 0, num_slots - 1), jnp.minimum(index, num_pages - 1)]
            for (slot, _, _), index in zip(loaded, indices, strict=True)
        ]
        for i, (slot, position, is_live) in enumerate(loaded):
            known = (slot > 0) & (slot < num_slots) & (position >= 0) & (indices[i] < num_pages)
            kv_slot = pages[i] * page_size + position - indices[i] * page_size
            out[tokens[i]] = jnp.where(is_live & known & (pages[i] > 0), kv_slot, NO_SLOT)

    kernel = plgpu.kernel(
        body,
        kernel_name="slot_mapping",
        out_type=jax.ShapeDtypeStruct(slots.shape, jnp.int32),
        grid=(pl.cdiv(num_tokens, _BLOCK_TOKENS),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(page_tables, slots, positions, live)
