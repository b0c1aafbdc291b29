"""`gdn_step` on a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts

_VALUES = 32  # rows of a state in one block of 4 warps; 16 and 64 measure alike


@functools.partial(jax.jit, static_argnames="interpret")
def gdn_step_kernel(
    q, k, v, g, beta, states, layer, slots, state_offset, query_len, *, interpret=None
):
    """`gdn_step` on a Hopper GPU; a block has `_VALUES` rows of one head's state of one row.

    They stay in registers from the candidate they are read from to the last one written; these
    bytes are what it takes its time for. `interpret`: parameters of Mosaic's interpreter.
    """

    _, num_slots, candidates, value_heads, value_dim, key_dim = states.shape
    width, key_heads = q.shape[1:3]
    tile = layouts.row_layout(key_dim, states.dtype.itemsize)
    load, store = access.load, access.store

    def body(q, k, v, g, beta, layer, slots, state_offset, query_len, pool, out, tokens, arrived):
        row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        key_head = lax.div(head, value_heads // key_heads)
        for index, x in enumerate((q, k)):
            plgpu.copy_gmem_to_smem(x.at[row, :, key_head], tokens.at[index], arrived)
        slot, count = slots[row], query_len[row]
        live = (slot > 0) & (slot < num_slots) & (count > 0)
        first = (layer[0] * num_slots + slot) * candidates
        values = pl.ds(part * _VALUES, _VALUES)
        block = pl.ds(head * value_dim + part * _VALUES, _VALUES)

        def keep(state, t):
            @pl.when(t < count)
            def _():
                store(pool.at[first + t, block], state.astype(states.dtype))

        @pl.when(live)
        def _():
            start = first + jnp.clip(state_offset[row], 0, candidates - 1)
            state = load(pool.at[start, block], tile).astype(jnp.float32)
            # All loads before the first store, which they could not overtake.
            decays = [jnp.exp(g[row, t, head]) for t in range(width)]
            betas = [beta[row, t, head] for t in range(width)]
            new = [load(v.at[row, t, head, values], tile.reduce(1)) for t in range(width)]
            plgpu.barrier_wait(arrived)
            for t in range(width):
                q_t, k_t = (load(tokens.at[i, t], tile.reduce(0)) for i in range(2))
                state, read = _advance(state, q_t, k_t, new[t], decays[t], betas[t])
                store(out.at[row, t, head, values], read)
                keep(state, t)

        @pl.when(jnp.logical_not(live))
        def _():
            plgpu.barrier_wait(arrived)  # a block must not end while a copy into it is under way
            nothing = plgpu.layout_cast(jnp.zeros(_VALUES, jnp.float32), tile.reduce(1))
            for t in range(width):
                store(out.at[row, t, head, values], nothing)

    operands = (q, k, v, g, beta, layer[None], slots, state_offset, query_len)
    return _launch(body, operands, states, interpret)


def _launch(body, operands, states, interpret):
    """Run `body` on its grid, with the pool as the last operand, written in place."""
    q, _, v, *_ = operands
    layers, num_slots, candidates, value_heads, value_dim, key_dim = states.shape
    kernel = plgpu.kernel(
        body,
        kernel_name="gdn_step",
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        scratch_types={
            "tokens": plgpu.SMEM((2, q.shape[1], q.shape[3]), jnp.float32),
            "arrived": plgpu.Barrier(num_arrivals=2),
        },
        grid=(q.shape[0], value_heads, value_dim // _VALUES),
        grid_names=("row", "head", "part"),
        # Safe without: a thread alone touches its elements of the pool, first to read them, and
        # the tokens in shared memory are written once.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    flat = (layers * num_slots * candidates, value_heads * value_dim, key_dim)
    pool = jax.new_ref(states.reshape(flat), memory_space=plgpu.GMEM)
    out = kernel(*operands, pool)
    return out, jax.freeze(pool).reshape(states.shape)


def _advance(state, q, k, v, decay, beta):
    """One token: the state `[values, key_dim]` after it, and what `q` reads from that."""
    state = state * decay
    recalled = jnp.sum(state * lax.broadcast_in_dim(k, state.shape, (1,)), axis=1)
    write = lax.broadcast_in_dim((v - recalled) * beta, state.shape, (0,))
    state = state + write * lax.broadcast_in_dim(k, state.shape, (1,))
    return state, jnp.sum(state * lax.broadcast_in_dim(q, state.shape, (1,)), axis=1)
