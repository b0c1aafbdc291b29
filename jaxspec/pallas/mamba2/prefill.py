"""Mamba2 prefill: prompt chunks on one flat axis of tokens, one final state per sequence."""

import jax.numpy as jnp

from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.heads import Mamba2Tokens, Outputs, States
from jaxspec.pallas.mamba2.step import advance
from jaxspec.pallas.recurrent.chunks import (
    chunk_by_chunk,
    product,
    token_by_token,
    why_not_chunk_blocks,
)
from jaxspec.regions import PrefillRegion


def mamba2_prefill(
    tokens: Mamba2Tokens, states: States, layer: int, chunks: PrefillRegion
) -> tuple[Outputs, States]:
    """Run the selective state space over each sequence: float32 outputs, and the new pool.

    `tokens` are `[tokens, ...]`; the rule is that of `mamba2_step`. Sequence `s` is
    `query_start[s]:query_start[s + 1]`. It starts from zero if `num_computed` is 0, else from its
    slot's candidate `state_offset`, and its final state becomes candidate 0. Sequences that are not
    live leave the pool unchanged; outputs of tokens outside every live sequence are 0.

    If `x` has 16 bits, the kernel rounds `B`, `C` and all other operands of tensor cores to its
    dtype, and sums in float32: in bfloat16 its error is a few 1e-3, in float16 an eighth of that,
    as long as every `B . C` and every state is below 65504.

    A sequence is computed in chunks of 64 tokens (Dao and Gu 2024, arXiv 2405.21060, section 6):
    with `G` the running sum of `A dt` from the chunk's start and `S_0` the state there, up to a
    chunk's last token `T`

        y_t = e^{G_t} S_0 C_t + sum_{i<=t} e^{G_t - G_i} (B_i . C_t) dt_i x_i + D x_t
        S_T = e^{G_T} S_0 + sum_i e^{G_T - G_i} dt_i x_i B_i^T
    """
    why = why_not_chunk_blocks(tokens.x, states)
    if dispatch.runs_kernel("mamba2_prefill", why, rows=tokens.x.shape[0]):
        from jaxspec.pallas.mamba2.prefill_kernel import mamba2_prefill_kernel

        padded, on_device = tokens.padded_to(states.shape[4]), dispatch.layer_index(states, layer)
        out, states = mamba2_prefill_kernel(padded, states, on_device, chunks)
        return out[..., : tokens.x.shape[-1]], states
    return mamba2_prefill_xla(tokens, states, layer, chunks)


def mamba2_prefill_xla(tokens, states, layer, chunks):
    """Compute `mamba2_prefill` with XLA: one chunk after the other, all heads at once."""
    head_dim = tokens.x.shape[-1]
    x, dt, a, b, c, d = tokens.padded_to(states.shape[4])

    def step(state, chunk):
        x, dt, b, c = chunk
        return _chunk(state, Mamba2Tokens(*(y.astype(jnp.float32) for y in (x, dt, a, b, c, d))))

    out, states = chunk_by_chunk(step, (x, dt, b, c), states, layer, chunks)
    return out[..., :head_dim], states


def _chunk(state, tokens):
    """Return the state `[heads, head_dim, state_dim]` after a chunk, and its outputs.

    A padding token is all zeros, so it does not change the state.
    """
    x, dt, a, b, c, d = tokens
    size, group = x.shape[0], x.shape[1] // b.shape[1]
    at_or_before = jnp.tril(jnp.ones((size, size), jnp.float32))
    before = jnp.tril(jnp.ones((size, size), jnp.float32), -1)
    # Logs of decays are summed over i < j <= t, not subtracted: terms of one sign lose no digits.
    logs = a[None] * dt
    decay = jnp.exp(product("tj,jh,ji->hti", at_or_before, logs, before)) * at_or_before[None]
    from_start = jnp.exp(product("tj,jh->th", at_or_before, logs))[..., None]

    cb = jnp.repeat(product("tgn,ign->gti", c, b), group, axis=0)
    b, c = (jnp.repeat(y, group, axis=1) for y in (b, c))
    new = dt[..., None] * x
    out = from_start * product("hpn,thn->thp", state, c) + d[None, :, None] * x
    out = out + product("hti,ihp->thp", decay * cb, new)
    to_end = decay[:, -1].T[..., None]
    state = from_start[-1][..., None] * state + product("ihp,ihn->hpn", to_end * new, b)
    return state, out


def mamba2_prefill_reference(tokens, states, layer, chunks):
    head_dim = tokens.x.shape[-1]
    x, dt, a, b, c, d = tokens.padded_to(states.shape[4])

    def step(state, token):
        x, dt, b, c = (y[None] for y in token)
        state, out = advance(state[None], x, dt, a, b, c)
        return state[0], out[0] + d[:, None] * x[0].astype(jnp.float32)

    out, states = token_by_token(step, (x, dt, b, c), states, layer, chunks)
    return out[..., :head_dim], states
