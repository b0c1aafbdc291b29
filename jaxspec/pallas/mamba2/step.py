"""Steps of Mamba2: of rows of a few tokens, and of a region's tokens in order."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.heads import Mamba2Tokens, Outputs, States
from jaxspec.pallas.recurrent.state_select import (
    check_candidates,
    state_select_reference,
    state_write_reference,
    why_not_states,
)
from jaxspec.pallas.recurrent.token_scan import scan_in_order
from jaxspec.regions import DecodeRegion, TokenRegion


def mamba2_step(
    tokens: Mamba2Tokens, states: States, layer: int, rows: DecodeRegion
) -> tuple[Outputs, States]:
    """Run the selective state space over each row's tokens: float32 outputs, and the new pool.

    Per token and head, with `S [head_dim, state_dim]` in float32 (Dao and Gu 2024, "Transformers
    are SSMs", arXiv 2405.21060, equation 1 with a scalar `A` per head, discretised as in Mamba):

        S <- exp(A dt) S + dt x B^T;   y = S C + D x

    `tokens` are `[rows, width, ...]`. The first state is the slot's candidate `state_offset`; the
    state after token `t` becomes candidate `t` for `t < query_len`. To roll back to `n` accepted
    drafts, the next step reads candidate `n`. Padding rows and tokens write nothing, and their
    outputs are undefined. States may have more rows per head than `x` (`padded_to`).

    Raises:
        ValueError: the pool has fewer candidates per slot than rows have tokens.
    """
    check_candidates(states, tokens.x.shape[1])
    why = why_not_kernel(tokens.x, states)
    if dispatch.runs_kernel("mamba2_step", why, rows=tokens.x.shape[0]):
        from jaxspec.pallas.mamba2.step_kernel import mamba2_step_kernel

        padded, on_device = tokens.padded_to(states.shape[4]), dispatch.layer_index(states, layer)
        out, states = mamba2_step_kernel(padded, states, on_device, rows)
        return out[..., : tokens.x.shape[-1]], states
    return mamba2_step_reference(tokens, states, layer, rows)


def mamba2_step_reference(tokens, states, layer, rows):
    head_dim = tokens.x.shape[-1]
    x, dt, a, b, c, d = tokens.padded_to(states.shape[4])
    state = state_select_reference(states, layer, rows).astype(jnp.float32)
    outputs, after = [], []
    for t in range(x.shape[1]):
        state, y = advance(state, x[:, t], dt[:, t], a, b[:, t], c[:, t])
        outputs.append(y + d[None, :, None] * x[:, t].astype(jnp.float32))
        after.append(state)
    states = state_write_reference(states, layer, rows, jnp.stack(after, axis=1))
    return jnp.stack(outputs, axis=1)[..., :head_dim], states


def advance(
    state: Float[Array, "rows heads head_dim state_dim"],
    x: Float[Array, "rows heads head_dim"],
    dt: Float[Array, "rows heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "rows groups state_dim"],
    c: Float[Array, "rows groups state_dim"],
) -> tuple[Array, Array]:
    """Return the state after one token, and the result of reading it with `c`, in float32."""
    group = x.shape[1] // b.shape[1]
    b, c = (jnp.repeat(y.astype(jnp.float32), group, axis=1) for y in (b, c))
    new = dt[..., None] * x.astype(jnp.float32)
    state = state * jnp.exp(a[None] * dt)[..., None, None] + new[..., None] * b[:, :, None]
    return state, jnp.einsum("rhpn,rhn->rhp", state, c, precision="highest")


def why_not_kernel(x: Float[Array, "rows width ..."], states: States) -> str | None:
    if x.shape[1] > 8:
        return f"{x.shape[1]} tokens a row, more than 8"
    return why_not_tokens(x, states)


def why_not_tokens(x: Float[Array, "*tokens heads head_dim"], states: States) -> str | None:
    """Return why the kernels of steps do not support these operands, or None."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"tokens in {x.dtype}"
    return why_not_states(states)


def mamba2_scan(
    tokens: Mamba2Tokens, states: States, layer: int, rows: TokenRegion
) -> tuple[Outputs, States]:
    """Return float32 outputs and the new pool, as `mamba2_step` of each token by itself would.

    `tokens` are `[tokens, ...]`. A token starts from its slot's candidate `state_offset`, a
    prompt's first one from zeros, and stores its state as `candidate`. Where the next token of the
    slot stores the same candidate, the kernel stores only the later state.
    """
    why = why_not_tokens(tokens.x, states)
    if dispatch.runs_kernel("mamba2_scan", why, rows=tokens.x.shape[0]):
        from jaxspec.pallas.mamba2.step_kernel import mamba2_scan_kernel

        padded, on_device = tokens.padded_to(states.shape[4]), dispatch.layer_index(states, layer)
        out, states = mamba2_scan_kernel(padded, states, on_device, rows)
        return out[..., : tokens.x.shape[-1]], states
    return mamba2_scan_reference(tokens, states, layer, rows)


def mamba2_scan_reference(tokens, states, layer, rows):
    if not len(tokens.x):
        return tokens.x.astype(jnp.float32), states
    head_dim = tokens.x.shape[-1]
    x, dt, a, b, c, d = tokens.padded_to(states.shape[4])

    def one(state, index):
        x_1, dt_1, b_1, c_1 = (lax.dynamic_slice_in_dim(y, index, 1) for y in (x, dt, b, c))
        state, y = advance(state, x_1, dt_1, a, b_1, c_1)
        return state, y + d[None, :, None] * x_1.astype(jnp.float32)

    outputs, states = scan_in_order(one, states, layer, rows)
    return outputs[..., :head_dim], states
