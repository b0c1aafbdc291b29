"""One verify step of Mamba2: a few tokens a row, the state after each one kept."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import access as mosaic
from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.recurrent.state_select import state_select_reference, state_write_reference

_States = Float[Array, "layers slots candidates heads head_dim state_dim"]


def mamba2_step(
    x: Float[Array, "rows width heads head_dim"],
    dt: Float[Array, "rows width heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "rows width groups state_dim"],
    c: Float[Array, "rows width groups state_dim"],
    d: Float[Array, " heads"],
    states: _States,
    layer: int,
    slots: Int[Array, " rows"],
    state_offset: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
) -> tuple[Float[Array, "rows width heads head_dim"], _States]:
    """The selective state space over each row's tokens: float32 outputs, and the new pool.

    Per token and head, with `S [head_dim, state_dim]` in float32 (Dao and Gu 2024, "Transformers
    are SSMs", arXiv 2405.21060, equation 1 with a scalar `A` a head, discretised as Mamba does):

        S <- exp(A dt) S + dt x B^T;   y = S C + D x

    `dt` (positive, after bias and softplus), `A` (negative) and `D` are float32; `x`, `B` and `C`
    come as the convolution leaves them, float32 or 16 bits. Head `h` uses the `B` and `C` of group
    `h // (heads // groups)`. The first state is the slot's candidate `state_offset`; the state
    after token `t` becomes candidate `t` for `t < query_len`. So rolling back to `n` accepted
    drafts is reading candidate `n` next time. Needs `candidates >= width` (ValueError). Padding
    rows and tokens write nothing, and what they put out means nothing.
    """
    width, candidates = x.shape[1], states.shape[2]
    if candidates < width:
        raise ValueError(
            f"A slot must hold one state for each of the {width} tokens of a row, but the pool "
            f"has {candidates} a slot. Build the cache with num_drafts >= {width - 1}."
        )
    tokens = (x, dt, a, b, c, d)
    if dispatch.runs_kernel("mamba2_step", unsupported(x, states)):
        on_device = dispatch.layer_index(states, layer)
        return _mamba2_step_kernel(*tokens, states, on_device, slots, state_offset, query_len)
    return mamba2_step_reference(*tokens, states, layer, slots, state_offset, query_len)


def mamba2_step_reference(x, dt, a, b, c, d, states, layer, slots, state_offset, query_len):
    """The specification of `mamba2_step`: one token after the other."""
    state = state_select_reference(states, layer, slots, state_offset).astype(jnp.float32)
    outputs, after = [], []
    for t in range(x.shape[1]):
        state, y = advance(state, x[:, t], dt[:, t], a, b[:, t], c[:, t])
        outputs.append(y + d[None, :, None] * x[:, t].astype(jnp.float32))
        after.append(state)
    after = jnp.stack(after, axis=1)
    return jnp.stack(outputs, axis=1), state_write_reference(states, layer, slots, query_len, after)


def advance(
    state: Float[Array, "rows heads head_dim state_dim"],
    x: Float[Array, "rows heads head_dim"],
    dt: Float[Array, "rows heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "rows groups state_dim"],
    c: Float[Array, "rows groups state_dim"],
) -> tuple[Array, Array]:
    """One token: the state after it, and what `c` reads from that, in float32."""
    group = x.shape[1] // b.shape[1]
    b, c = (jnp.repeat(y.astype(jnp.float32), group, axis=1) for y in (b, c))
    new = dt[..., None] * x.astype(jnp.float32)
    state = state * jnp.exp(a[None] * dt)[..., None, None] + new[..., None] * b[:, :, None]
    return state, jnp.einsum("rhpn,rhn->rhp", state, c, precision="highest")


def unsupported(x, states):
    """Why the kernels of this op and of `mamba2_replay` do not take these operands, or None."""
    head_dim, state_dim = states.shape[4:]
    if x.shape[1] > 8:
        return f"{x.shape[1]} tokens a row, more than 8"
    for what, dtype in (("tokens", x.dtype), ("states", states.dtype)):
        if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"{what} in {dtype}"
    if head_dim not in (64, 128) or state_dim not in (64, 128):
        return f"heads of {head_dim} x {state_dim}, not 64 or 128"
    return None


_ROWS = 32  # of a head's state in one block of 4 warps


@functools.partial(jax.jit, static_argnames="interpret")
def _mamba2_step_kernel(
    x, dt, a, b, c, d, states, layer, slots, state_offset, query_len, *, interpret=None
):
    """`mamba2_step` on a Hopper GPU; a block has `_ROWS` rows of one head's state of one row.

    As in `gdn_step` they stay in registers from the candidate they are read from to the last one
    written. `interpret`: parameters of Mosaic's interpreter.
    """
    # Here, because it takes 0.2 s and not every build of jaxlib for a CPU can import it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    _, num_slots, candidates, heads, head_dim, state_dim = states.shape
    width, groups = b.shape[1:3]
    tile = layouts.row_layout(plgpu, state_dim, states.dtype.itemsize)
    load, store = functools.partial(mosaic.load, plgpu), functools.partial(mosaic.store, plgpu)

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
    return _launch(plgpu, body, operands, states, interpret)


def _launch(plgpu, body, operands, states, interpret):
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
