"""One verify step of Mamba2: a few tokens a row, the state after each one kept."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
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
        from jaxspec.pallas.mamba2.step_kernel import mamba2_step_kernel

        on_device = dispatch.layer_index(states, layer)
        return mamba2_step_kernel(*tokens, states, on_device, slots, state_offset, query_len)
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
