"""Kernel code shared by `gdn_scan` and `mamba2_scan`: everything except the recurrence.

A block advances `BLOCK_VALUES` rows of one head's state over all tokens of a slot. It is the block
of the slot's first token; those of its other tokens end at once. The state stays in registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.recurrent.step_block import BLOCK_VALUES, Recurrence, StepBlock
from jaxspec.regions import is_live


def launch_scan(name, recurrence: Recurrence, tokens, states, layer, rows, interpret):
    """Return float32 outputs `[tokens, heads, values]`, and the pool, written in place.

    `tokens` have a width of 1: `[tokens, 1, ...]`.
    """
    layers, num_slots, candidates, heads, value_dim, state_dim = states.shape
    num_tokens = len(rows.slots)
    kernel = plgpu.kernel(
        functools.partial(_run_block, recurrence, states.shape),
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((num_tokens, heads, value_dim), jnp.float32),
        grid=(num_tokens, heads, value_dim // BLOCK_VALUES),
        grid_names=("token", "head", "part"),
        # Safe without automatic barriers: only one thread accesses an element of the pool.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    flat = (layers * num_slots * candidates, heads * value_dim, state_dim)
    pool = jax.new_ref(states.reshape(flat), memory_space=plgpu.GMEM)
    out = kernel(tokens, layer[None], rows, pool)
    return out, jax.freeze(pool).reshape(states.shape)


def _run_block(recurrence, states_shape, tokens, layer, rows, pool, out):
    """Run one block; all array operands are references."""
    _, num_slots, candidates, heads, value_dim, state_dim = states_shape
    begin, head, part = (lax.axis_index(axis) for axis in ("token", "head", "part"))
    sources = recurrence.shared(tokens)
    group = lax.div(head, heads // sources[0].shape[2])
    tile = layouts.row_layout(state_dim, pool.dtype.itemsize)
    values = pl.ds(part * BLOCK_VALUES, BLOCK_VALUES)
    own = pl.ds(head * value_dim + part * BLOCK_VALUES, BLOCK_VALUES)
    slot = rows.slots[begin]
    candidate_0 = (layer[0] * num_slots + slot) * candidates
    last = rows.end[begin] - 1

    def fetched(token):
        """Load a token's operands."""
        vectors = [access.load(source.at[token, 0, group], tile.reduce(0)) for source in sources]
        block = StepBlock(token, head, values, tile.reduce(1))
        return vectors, recurrence.load(tokens, block)[0]

    def advance(token, carried):
        state, (vectors, operands) = carried
        # Before the stores, because the compiler moves no load above a store.
        following = fetched(jnp.minimum(token + 1, last))
        candidate = rows.candidate[token]
        is_stored = (token == last) | (candidate != rows.candidate[jnp.minimum(token + 1, last)])
        state, y = recurrence.advance(state, *vectors, operands)
        rounded = state.astype(pool.dtype)
        access.store(out.at[token, head, values], y)

        @pl.when(is_stored)
        def _():
            access.store(pool.at[candidate_0 + candidate, own], rounded)

        return rounded.astype(jnp.float32), following

    live = is_live(slot, rows.query_len[begin], num_slots)

    @pl.when(live & (rows.first[begin] == begin))
    def _():
        source = candidate_0 + jnp.clip(rows.state_offset[begin], 0, candidates - 1)

        def stored():
            return access.load(pool.at[source, own], tile).astype(jnp.float32)

        def zeros():
            return plgpu.layout_cast(jnp.zeros((BLOCK_VALUES, state_dim), jnp.float32), tile)

        state = lax.cond(rows.num_computed[begin] > 0, stored, zeros)
        lax.fori_loop(begin, last + 1, advance, (state, fetched(begin)))

    @pl.when(jnp.logical_not(live))
    def _():
        zeros = plgpu.layout_cast(jnp.zeros(BLOCK_VALUES, jnp.float32), tile.reduce(1))
        access.store(out.at[begin, head, values], zeros)
