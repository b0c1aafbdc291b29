"""Mamba2 verify step with a replay ring in place of a state after each token."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2 import step as step_op
from jaxspec.pallas.mamba2.heads import Mamba2Ring, Mamba2Tokens, Outputs, ReplayBases
from jaxspec.pallas.mamba2.step import advance
from jaxspec.pallas.recurrent.replay import (
    check_ring,
    must_fold,
    ring_reader,
    ring_writer,
    rounded_to,
    sums_after,
    write_folded,
)
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.regions import DecodeRegion


def mamba2_replay(
    tokens: Mamba2Tokens, states: ReplayBases, ring: Mamba2Ring, layer: int, rows: DecodeRegion
) -> tuple[Outputs, ReplayBases, Mamba2Ring]:
    """Run the selective state space over each row's tokens: float32 outputs, new pool, new ring.

    The rule is that of `mamba2_step`, and `tokens` are `[rows, width, ...]`. A slot's state is its
    replay base, stored in `states`, plus the ring's tokens at `num_computed - ring_length ..
    num_computed - 1`. With the running sum `T` of their `dt`:

        S = exp(A T_P) S_0 + sum_j exp(A (T_P - T_j)) dt_j x_j B_j^T

    A row that must fold (`must_fold`) writes this as its new replay base. Its tokens `t <
    query_len` are written to the ring at `num_computed + t`; the caller counts the accepted ones
    with `next_ring_length`. `x` and `B` are rounded to the ring's dtype before they change a state,
    so that a later replay computes with the same values as this step. Padding rows and tokens write
    nothing, and their outputs are undefined.

    Raises:
        ValueError: the ring is too small for steps of this width (`check_ring`).
    """
    check_ring(tokens.x.shape[1], ring.window, ring.num_rows)
    why = why_not_kernel(tokens.x, states, ring)
    if dispatch.runs_kernel("mamba2_replay", why, rows=tokens.x.shape[0]):
        from jaxspec.pallas.mamba2.replay_kernel import mamba2_replay_kernel

        padded, on_device = tokens.padded_to(states.shape[4]), dispatch.layer_index(states, layer)
        out, states, ring = mamba2_replay_kernel(padded, states, ring, on_device, rows)
        return out[..., : tokens.x.shape[-1]], states, ring
    return mamba2_replay_reference(tokens, states, ring, layer, rows)


def mamba2_replay_reference(tokens, states, ring, layer, rows):
    """Reference for `mamba2_replay`: replay each row's ring, then advance token by token."""
    head_dim = tokens.x.shape[-1]
    x, dt, a, b, c, d = tokens.padded_to(states.shape[4])
    width, live = x.shape[1], rows.is_live(states.shape[1])
    append = ring_writer(ring, layer, rows, live, width)
    # Written before the ring is read, so that XLA need not copy it; the read masks these rows.
    x_ring, b_ring, dt_ring = append(ring.x, x), append(ring.b, b), append(ring.dt, dt)
    ring = dataclasses.replace(ring, x=x_ring, b=b_ring, dt=dt_ring)
    start = replayed_states(states, ring, a, layer, rows)

    state, outputs = start, []
    x_kept, b_kept = rounded_to(x, ring.x.dtype), rounded_to(b, ring.b.dtype)
    for t in range(width):
        state, y = advance(state, x_kept[:, t], dt[:, t], a, b_kept[:, t], c[:, t])
        outputs.append(y + d[None, :, None] * x[:, t].astype(jnp.float32))

    folds = live & must_fold(rows.ring_length, width, ring.window)
    states = write_folded(states, start, folds, layer, rows)
    return jnp.stack(outputs, axis=1)[..., :head_dim], states, ring


def replayed_states(
    states: ReplayBases, ring: Mamba2Ring, a: Float[Array, " heads"], layer: int, rows: DecodeRegion
) -> Float[Array, "rows heads head_dim state_dim"]:
    """Return each row's state before its step: its replay base plus the ring's tokens, float32."""
    group = ring.x.shape[3] // ring.b.shape[3]
    gather = ring_reader(ring, layer, rows)
    x, b, dt = gather(ring.x), jnp.repeat(gather(ring.b), group, axis=2), gather(ring.dt)
    after = sums_after(dt)
    decay = jnp.exp(a[None] * jnp.sum(dt, axis=1))[..., None, None]
    weight = jnp.exp(a[None, None] * after) * dt
    checkpoint = state_select_reference(states, layer, rows)
    added = jnp.einsum("rwh,rwhp,rwhn->rhpn", weight, x, b, precision="highest")
    return decay * checkpoint.astype(jnp.float32) + added


def why_not_kernel(
    x: Float[Array, "rows width ..."], states: ReplayBases, ring: Mamba2Ring
) -> str | None:
    """Return why a replay kernel cannot take these operands, or None.

    `x` may be a projection: its last axes are not checked.
    """
    if ring.window > 64:
        return f"a ring with a window of {ring.window} tokens, more than 64"
    return step_op.why_not_kernel(x, states)
