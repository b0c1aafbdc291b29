"""`mamba2_step` on a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts

_ROWS = 32  # of a head's state in one block of 4 warps


@functools.partial(jax.jit, static_argnames="interpret")
def mamba2_step_kernel(
    x, dt, a, b, c, d, states, layer, slots, state_offset, query_len, *, interpret=None
):
    """`mamba2_step` on a Hopper GPU; a block has `_ROWS` rows of one head's state of one row.

    As in `gdn_step` they stay in registers from the candidate they are read from to the last one
    written. `interpret`: parameters of Mosaic's interpreter.
    """

    _, num_slots, candidates, heads, head_dim, state_dim = states.shape
    width, groups = b.shape[1:3]
    tile = layouts.row_layout(state_dim, states.dtype.itemsize)
    load, store = access.load, access.store

    def body(x, dt, a, b, c, d, layer, slots, state_offset, query_len, pool, out, tokens, arrived):
        row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        group = lax.div(head, heads // groups)
        for index, y in enumerate((b, c)):
            plgpu.copy_gmem_to_smem(y.at[row, :, group], tokens.at[index], arrived)
        slot, count = slots[row], query_len[row]
        live = (slot > 0) & (slot < num_slots) & (count > 0)
        first = (layer[0] * num_slots + slot) * candidates
        values = pl.ds(part * _ROWS, _ROWS)
        block = pl.ds(head * head_dim + part * _ROWS, _ROWS)

        def keep(state, t):
            @pl.when(t < count)
            def _():
                store(pool.at[first + t, block], state.astype(states.dtype))

        @pl.when(live)
        def _():
            start = first + jnp.clip(state_offset[row], 0, candidates - 1)
            state = load(pool.at[start, block], tile).astype(jnp.float32)
            # All loads before the first store, which they could not overtake.
            steps = [dt[row, t, head] for t in range(width)]
            decays, skip = [jnp.exp(a[head] * step) for step in steps], d[head]
            new = [load(x.at[row, t, head, values], tile.reduce(1)) for t in range(width)]
            plgpu.barrier_wait(arrived)
            for t in range(width):
                b_t, c_t = (load(tokens.at[i, t], tile.reduce(0)) for i in range(2))
                x_t = new[t].astype(jnp.float32)
                state, y = _advance(state, x_t * steps[t], decays[t], b_t, c_t)
                store(out.at[row, t, head, values], y + skip * x_t)
                keep(state, t)

        @pl.when(jnp.logical_not(live))
        def _():
            plgpu.barrier_wait(arrived)  # a block must not end while a copy into it is under way
            nothing = plgpu.layout_cast(jnp.zeros(_ROWS, jnp.float32), tile.reduce(1))
            for t in range(width):
                store(out.at[row, t, head, values], nothing)

    operands = (x, dt, a, b, c, d, layer[None], slots, state_offset, query_len)
    return _launch(body, operands, states, interpret)


def _launch(body, operands, states, interpret):
    """Run `body` on its grid, with the pool as the last operand, written in place."""
    x, _, _, b, *_ = operands
    layers, num_slots, candidates, heads, head_dim, state_dim = states.shape
    kernel = plgpu.kernel(
        body,
        kernel_name="mamba2_step",
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types={
            "tokens": plgpu.SMEM((2, x.shape[1], state_dim), b.dtype),
            "arrived": plgpu.Barrier(num_arrivals=2),
        },
        grid=(x.shape[0], heads, head_dim // _ROWS),
        grid_names=("row", "head", "part"),
        # Safe without: a thread alone touches its elements of the pool, first to read them, and
        # the tokens in shared memory are written once.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    flat = (layers * num_slots * candidates, heads * head_dim, state_dim)
    pool = jax.new_ref(states.reshape(flat), memory_space=plgpu.GMEM)
    out = kernel(*operands, pool)
    return out, jax.freeze(pool).reshape(states.shape)


def _advance(state, new, decay, b, c):
    """One token: the state `[_ROWS, state_dim]` after it, and what `c` reads from that."""
    b, c = (lax.broadcast_in_dim(y.astype(jnp.float32), state.shape, (1,)) for y in (b, c))
    state = state * decay + lax.broadcast_in_dim(new, state.shape, (0,)) * b
    return state, jnp.sum(state * c, axis=1)
