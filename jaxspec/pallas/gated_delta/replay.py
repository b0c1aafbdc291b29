"""Verify step of Gated DeltaNet with a replay ring instead of a state per token."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import GdnRing, GdnTokens, ReplayBases, over_state
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import (
    check_ring,
    must_fold,
    ring_reader,
    ring_writer,
    rounded_to,
    sums_after,
    write_folded,
)
from jaxspec.pallas.recurrent.state_select import state_select_reference, why_not_states
from jaxspec.regions import DecodeRegion

Outputs = Float[Array, "rows width value_heads value_dim"] | Float[Array, "rows width features"]


def gdn_replay(
    tokens: GdnTokens,
    states: ReplayBases,
    ring: GdnRing,
    layer: int,
    rows: DecodeRegion,
    norm: GatedNorm | None = None,
) -> tuple[Outputs, ReplayBases, GdnRing]:
    """Run the gated delta rule over each row's tokens; return outputs, new pool and new ring.

    The rule is that of `gdn_step`, and `tokens` are `[rows, width, ...]`. The state of a slot is
    its replay base `S_0` plus the ring's tokens at positions `num_computed - ring_length` to
    `num_computed - 1`; with `G` the running sum of their `g`, and `G_P` its last value:

        S = exp(G_P) S_0 + sum_j exp(G_P - G_j) u_j k_j^T

    A decay by channel multiplies the columns of `S_0` and the channels of `k_j`.

    A row that folds (`must_fold`) writes this state as its replay base, and continues from the
    rounded numbers. Tokens `t < query_len` are stored in the ring at position `num_computed + t`;
    the caller counts the accepted ones with `next_ring_length`. `k` and `u` are rounded to the
    ring's dtype before any use, so that a later replay has the numbers of this step. Outputs are
    float32. Padding rows and tokens write nothing, and their outputs are undefined.

    With a `norm`, which has the gates of all tokens row by row, the outputs may already be
    normalised: `[rows, width, features]` in the dtype of its gates. This is so if the kernel runs
    with one block per head. Otherwise the outputs are those without a norm.

    Raises:
        ValueError: The ring is too small for steps of this width (`check_ring`), or `norm` does not
            match the tokens and heads (`GatedNorm.check`).
    """
    num_rows, width = tokens.q.shape[:2]
    check(num_rows, width, states, ring, norm)
    if dispatch.runs_kernel("gdn_replay", why_not_kernel(width, states, ring), rows=num_rows):
        from jaxspec.pallas.gated_delta.replay_kernel import gdn_replay_kernel

        on_device = dispatch.layer_index(states, layer)
        return gdn_replay_kernel(tokens, states, ring, on_device, rows, norm)
    return gdn_replay_reference(tokens, states, ring, layer, rows)


def check(
    num_rows: int, width: int, states: ReplayBases, ring: GdnRing, norm: GatedNorm | None
) -> None:
    """Raise the ValueError of `gdn_replay` for `num_rows` rows of `width` tokens."""
    check_ring(width, ring.window, ring.num_rows)
    if norm is not None:
        norm.check(num_rows * width, states.shape[3] * states.shape[4])


def gdn_replay_reference(tokens, states, ring, layer, rows):
    """Reference for `gdn_replay`: fold where necessary, then one token after the other."""
    q, k, v, g, beta = tokens
    width, group = q.shape[1], states.shape[3] // q.shape[2]
    live = rows.is_live(states.shape[1])
    append = ring_writer(ring, layer, rows, live, width)
    # Written before the ring is read, in rows that do not count yet: XLA need not copy it then.
    ring = dataclasses.replace(ring, k=append(ring.k, k), g=append(ring.g, g))
    start = replayed_states(states, ring, layer, rows)

    folds = live & must_fold(rows.ring_length, width, ring.window)
    state = jnp.where(folds[:, None, None, None], rounded_to(start, states.dtype), start)
    outputs, updates = [], []
    for t in range(width):
        k_t = rounded_to(k[:, t], ring.k.dtype)
        q_h, k_h = (jnp.repeat(x, group, axis=1) for x in (q[:, t], k_t))
        state = state * over_state(jnp.exp(g[:, t]), state)
        recalled = jnp.einsum("rhvk,rhk->rhv", state, k_h, precision="highest")
        u_t = beta[:, t][..., None] * (v[:, t] - recalled)
        u_t = rounded_to(u_t, ring.u.dtype)
        state = state + u_t[..., None] * k_h[..., None, :]
        outputs.append(jnp.einsum("rhvk,rhk->rhv", state, q_h, precision="highest"))
        updates.append(u_t)

    states = write_folded(states, start, folds, layer, rows)
    ring = dataclasses.replace(ring, u=append(ring.u, jnp.stack(updates, axis=1)))
    return jnp.stack(outputs, axis=1), states, ring


def replayed_states(
    states: ReplayBases, ring: GdnRing, layer: int, rows: DecodeRegion
) -> Float[Array, "rows value_heads value_dim key_dim"]:
    """Return each row's float32 state before its step: its replay base plus the ring's tokens."""
    group = states.shape[3] // ring.k.shape[3]
    gather = ring_reader(ring, layer, rows)
    k, u, g = jnp.repeat(gather(ring.k), group, axis=2), gather(ring.u), gather(ring.g)
    checkpoint = state_select_reference(states, layer, rows)
    decay = over_state(jnp.exp(jnp.sum(g, axis=1)), checkpoint)
    if g.ndim == u.ndim:
        heads, channels = g.shape[2:]
        flat = g.reshape(*g.shape[:2], heads * channels)
        k = jnp.exp(sums_after(flat)).reshape(g.shape) * k
        added = jnp.einsum("rwhv,rwhk->rhvk", u, k, precision="highest")
    else:
        after = jnp.exp(sums_after(g))
        added = jnp.einsum("rwh,rwhv,rwhk->rhvk", after, u, k, precision="highest")
    return decay * checkpoint.astype(jnp.float32) + added


def why_not_kernel(width: int, states: ReplayBases, ring: GdnRing) -> str | None:
    if width > 8:
        return f"{width} tokens a row, more than 8"
    if ring.window > 64:
        return f"a ring with a window of {ring.window} tokens, more than 64"
    if why := why_not_states(states):
        return why
    if not states.dtype == ring.k.dtype == ring.u.dtype:
        return f"a ring in {ring.k.dtype} for states in {states.dtype}"
    return None
