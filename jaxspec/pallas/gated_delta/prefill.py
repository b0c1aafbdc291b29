"""Prefill of Gated DeltaNet: flat prompt chunks, and one final state per sequence."""

import jax.numpy as jnp

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.chunk_by_channel import chunk_by_channel
from jaxspec.pallas.gated_delta.heads import GdnTokens, States, Values, over_state
from jaxspec.pallas.recurrent.chunks import (
    chunk_by_chunk,
    product,
    token_by_token,
    unit_lower_inverse,
    why_not_chunk_blocks,
)
from jaxspec.regions import PrefillRegion


def gdn_prefill(
    tokens: GdnTokens, states: States, layer: int, chunks: PrefillRegion
) -> tuple[Values, States]:
    """Run the gated delta rule over each sequence; return float32 outputs, and the new pool.

    `tokens` are `[tokens, ...]`, and the outputs have the shape of `v`; the rule is that of
    `gdn_step`. Sequence `s` is `query_start[s]:query_start[s + 1]`. It starts from zero if
    `num_computed` is 0, else from its slot's candidate `state_offset`, and its final state is
    written as candidate 0. Sequences that are not live leave the pool unchanged; the output of
    tokens outside every live sequence is 0. In FLA this is `chunk_gated_delta_rule`.

    `v` may have the model's dtype. If that has 16 bits, the kernel rounds `q`, `k` and all other
    operands of tensor cores to it, and sums in float32. In bfloat16 the error is a few 1e-3, and up
    to 2e-2 if all keys and queries resemble each other; in float16 it is an eighth of that.

    A sequence is computed in chunks of 64 tokens: with `G` the running sum of `g` from a chunk's
    start and `u_t` the written values, the rule is one unit lower triangular system per chunk (Yang
    et al. 2024, "Gated Delta Networks", arXiv 2412.06464, section 3.3):

        u_t + beta_t sum_{i<t} e^{G_t - G_i} (k_i . k_t) u_i = beta_t (v_t - e^{G_t} S_0 k_t)
        o_t = e^{G_t} S_0 q_t + sum_{i<=t} e^{G_t - G_i} (k_i . q_t) u_i

    A decay by channel (Kimi Delta Attention) is inside the products of keys and queries: see
    `chunk_by_channel`.
    """
    why = _why_not_kernel(tokens, states)
    if dispatch.runs_kernel("gdn_prefill", why, rows=tokens.v.shape[0]):
        from jaxspec.pallas.gated_delta.prefill_kernel import gdn_prefill_kernel

        return gdn_prefill_kernel(tokens, states, dispatch.layer_index(states, layer), chunks)
    return gdn_prefill_xla(tokens, states, layer, chunks)


def _why_not_kernel(tokens, states):
    key_heads, value_heads = tokens.k.shape[1], tokens.v.shape[1]
    if tokens.g.ndim == tokens.v.ndim and key_heads != value_heads:
        return f"a decay by channel of {value_heads} heads with {key_heads} key heads"
    return why_not_chunk_blocks(tokens.v, states)


def gdn_prefill_xla(tokens, states, layer, chunks):
    """`gdn_prefill` in XLA: one chunk after the other, all heads at once."""
    group = tokens.v.shape[1] // tokens.k.shape[1]
    advance = chunk_by_channel if tokens.g.ndim == tokens.v.ndim else _chunk

    def step(state, chunk):
        # Heads first. A padding token is all zeros, so it leaves the state unchanged.
        q, k, v, g, beta = (x.astype(jnp.float32).swapaxes(0, 1) for x in chunk)
        q, k = (jnp.repeat(x, group, axis=0) for x in (q, k))
        state, out = advance(GdnTokens(q, k, v, g, beta), state)
        return state, out.swapaxes(0, 1)

    return chunk_by_chunk(step, tokens, states, layer, chunks)


def _chunk(tokens, state):
    """Return the state after a chunk, and its outputs; arrays are `[heads, tokens, ...]`."""
    q, k, v, g, beta = tokens
    size = g.shape[1]
    at_or_before = jnp.tril(jnp.ones((size, size), jnp.float32))
    before = jnp.tril(jnp.ones((size, size), jnp.float32), -1)
    # log_decay[t, i] = sum of g over i < j <= t, a sum and no difference: terms of one sign lose no
    # digits, however fast the state decays. Zero above the diagonal, where it is masked below.
    log_decay = product("tj,hj,ji->hti", at_or_before, g, before)
    decay = jnp.exp(log_decay) * at_or_before[None]
    from_start = jnp.exp(product("tj,hj->ht", at_or_before, g))[..., None]

    mixing = beta[..., None] * decay * product("htk,hik->hti", k, k) * before[None]
    wanted = beta[..., None] * (v - from_start * product("htk,hvk->htv", k, state))
    written = product("hti,hiv->htv", unit_lower_inverse(mixing), wanted)
    attention = decay * product("htk,hik->hti", q, k)
    out = from_start * product("htk,hvk->htv", q, state) + product(
        "hti,hiv->htv", attention, written
    )
    to_end = decay[:, -1, :, None]
    state = from_start[:, -1:, :] * state + product("htv,htk->hvk", written, to_end * k)
    return state, out


def gdn_prefill_reference(tokens, states, layer, chunks):
    """Reference for `gdn_prefill`: one token after the other."""
    group = tokens.v.shape[1] // tokens.k.shape[1]

    def step(state, token):
        q, k, v, g, beta = (x.astype(jnp.float32) for x in token)
        q, k = (jnp.repeat(x, group, axis=0) for x in (q, k))
        state = state * over_state(jnp.exp(g), state)
        delta = beta[:, None] * (v - product("hvk,hk->hv", state, k))
        state = state + delta[:, :, None] * k[:, None, :]
        return state, product("hvk,hk->hv", state, q)

    return token_by_token(step, tokens, states, layer, chunks)
