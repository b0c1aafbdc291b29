"""Kernel code shared by `gdn_step` and `mamba2_step`: everything except the recurrence.

A block advances `BLOCK_VALUES` rows of one head's state, for one row of the batch. They stay in
registers from the candidate that is read to the last one written, because the kernels are bound by
the bytes of the candidates.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts
from jaxspec.regions import is_live

BLOCK_VALUES = 32  # rows of a state per block of 4 warps; 16 and 64 are as fast


class StepBlock(NamedTuple):
    """Part of the tokens and of the pool that one block handles."""

    row: jax.Array  # row of the batch
    head: jax.Array
    values: Any  # slice of the head's values
    value_layout: Any  # register layout of those values


class Recurrence(NamedTuple):
    """Functions of one kind of recurrence; `tokens` is a pytree of arrays `[rows, width, ...]`.

    `shared(tokens)` returns the arrays `[rows, width, groups, state_dim]` of which a block reads
    one group, through shared memory. `load(tokens, block)` returns the other operands of each
    token, in registers. `advance(state, *vectors, operands)` returns the state after a token, and
    its outputs; `vectors` are the token's parts of the shared arrays.
    """

    shared: Callable
    load: Callable
    advance: Callable


class _Rows(NamedTuple):
    """Layer and row indices, as references in the kernel."""

    layer: Any  # [1]
    slots: Any
    state_offset: Any
    query_len: Any


def launch(name, recurrence, tokens, states, layer, rows, interpret):
    """Return float32 outputs `[rows, width, heads, values]`, and the pool, written in place."""
    layers, num_slots, candidates, heads, value_dim, state_dim = states.shape
    first, *others = recurrence.shared(tokens)
    num_rows, width = first.shape[:2]
    num_shared = 1 + len(others)
    kernel = plgpu.kernel(
        functools.partial(_run_block, recurrence, states.shape),
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((num_rows, width, heads, value_dim), jnp.float32),
        scratch_types={
            "arrived": plgpu.Barrier(num_arrivals=num_shared),
            "shared": plgpu.SMEM((num_shared, width, state_dim), first.dtype),
        },
        grid=(num_rows, heads, value_dim // BLOCK_VALUES),
        grid_names=("row", "head", "part"),
        # Safe without automatic barriers: only one thread accesses an element of the pool, and the
        # shared vectors are written once.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    flat = (layers * num_slots * candidates, heads * value_dim, state_dim)
    pool = jax.new_ref(states.reshape(flat), memory_space=plgpu.GMEM)
    indices = _Rows(layer[None], rows.slots, rows.state_offset, rows.query_len)
    out = kernel(tokens, indices, pool)
    return out, jax.freeze(pool).reshape(states.shape)


def _run_block(recurrence, states_shape, tokens, rows, pool, out, *, arrived, shared):
    """Run one block; all array operands are references, and `shared` is in shared memory."""
    _, num_slots, candidates, heads, value_dim, state_dim = states_shape
    row, head, part = (lax.axis_index(axis) for axis in ("row", "head", "part"))
    sources = recurrence.shared(tokens)
    width, groups = sources[0].shape[1:3]
    group = lax.div(head, heads // groups)
    for index, source in enumerate(sources):
        plgpu.copy_gmem_to_smem(source.at[row, :, group], shared.at[index], arrived)
    slot, count = rows.slots[row], rows.query_len[row]
    live = is_live(slot, count, num_slots)
    candidate_0 = (rows.layer[0] * num_slots + slot) * candidates
    tile = layouts.row_layout(state_dim, pool.dtype.itemsize)
    block = StepBlock(row, head, pl.ds(part * BLOCK_VALUES, BLOCK_VALUES), tile.reduce(1))
    own = pl.ds(head * value_dim + part * BLOCK_VALUES, BLOCK_VALUES)

    def store_state(state, t):
        @pl.when(t < count)
        def _():
            access.store(pool.at[candidate_0 + t, own], state.astype(pool.dtype))

    @pl.when(live)
    def _():
        source = candidate_0 + jnp.clip(rows.state_offset[row], 0, candidates - 1)
        state = access.load(pool.at[source, own], tile).astype(jnp.float32)
        # All loads precede the first store, because the compiler moves no load above a store.
        operands = recurrence.load(tokens, block)
        plgpu.barrier_wait(arrived)
        for t in range(width):
            vectors = [access.load(shared.at[i, t], tile.reduce(0)) for i in range(len(sources))]
            state, y = recurrence.advance(state, *vectors, operands[t])
            access.store(out.at[row, t, head, block.values], y)
            store_state(state, t)

    @pl.when(jnp.logical_not(live))
    def _():
        plgpu.barrier_wait(arrived)  # a block must not exit while a copy into it is in flight
        zeros = plgpu.layout_cast(jnp.zeros(BLOCK_VALUES, jnp.float32), block.value_layout)
        for t in range(width):
            access.store(out.at[row, t, head, block.values], zeros)
