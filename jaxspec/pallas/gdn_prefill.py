"""Prefill of Gated DeltaNet: chunks of prompts laid flat, one final state a sequence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.state_select import state_select

_CHUNK = 64  # tokens solved at once; a chunk never spans two sequences

_States = Float[Array, "layers slots candidates value_heads value_dim key_dim"]


def gdn_prefill(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens value_heads value_dim"],
    g: Float[Array, "tokens value_heads"],
    beta: Float[Array, "tokens value_heads"],
    states: _States,
    layer: int,
    slots: Int[Array, " seqs"],
    state_offset: Int[Array, " seqs"],
    num_computed: Int[Array, " seqs"],
    query_start: Int[Array, " seqs+1"],
) -> tuple[Float[Array, "tokens value_heads value_dim"], _States]:
    """The gated delta rule over each sequence: float32 outputs, and the new pool.

    The law, the dtypes and the head grouping are `gdn_step`'s. Sequence `s` is
    `query_start[s]:query_start[s + 1]`. It starts from zero when `num_computed` is 0, else from its
    slot's candidate `state_offset`, and leaves its final state as candidate 0. Empty sequences and
    slot 0 leave the pool untouched; tokens outside every sequence come out as 0.

    `v` may come in the model's dtype. If that has 16 bits, the kernel rounds to it `q`, `k` and
    whatever else tensor cores multiply, and sums in float32. In bfloat16 its error is a few 1e-3,
    and up to 2e-2 where keys and queries all resemble each other; in float16 an eighth of that.

    Chunked: with `G` the running sum of `g` from the chunk's start and `u_t` the written values,
    the rule is one unit lower triangular system a chunk (Yang et al. 2024, arXiv 2412.06464, §3.3):

        u_t + beta_t sum_{i<t} e^{G_t - G_i} (k_i . k_t) u_i = beta_t (v_t - e^{G_t} S_0 k_t)
        o_t = e^{G_t} S_0 q_t + sum_{i<=t} e^{G_t - G_i} (k_i . q_t) u_i
    """
    if dispatch.runs_kernel("gdn_prefill", _unsupported(v, states)):
        # Here, because it takes 0.2 s and not every build of jaxlib for a CPU can import it.
        from jaxspec.pallas.gdn_prefill_kernel import prefill

        on_device = dispatch.layer_index(states, layer)
        index = (slots, state_offset, num_computed, query_start)
        return prefill(q, k, v, g, beta, states, on_device, *index)
    return _gdn_prefill_chunked(
        q, k, v, g, beta, states, layer, slots, state_offset, num_computed, query_start
    )


def _unsupported(v, states):
    """Why the kernel does not take these operands, or None."""
    value_dim, key_dim = states.shape[4:]
    if v.dtype not in (jnp.bfloat16, jnp.float16):
        return f"values in {v.dtype}, not 16 bits"
    if states.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"states in {states.dtype}"
    if value_dim not in (64, 128) or key_dim not in (64, 128):
        return f"heads of {value_dim} x {key_dim}, not 64 or 128"
    if v.shape[0] % 8:
        return f"{v.shape[0]} tokens, no multiple of 8"
    return None


def _gdn_prefill_chunked(
    q, k, v, g, beta, states, layer, slots, state_offset, num_computed, query_start
):
    """`gdn_prefill` for XLA: one chunk after the other, of all heads at once."""
    num_tokens, seqs = q.shape[0], slots.shape[0]
    num_slots = states.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    length = jnp.where((slots > 0) & (slots < num_slots), query_start[1:] - query_start[:-1], 0)
    chunks_end = jnp.cumsum((length + _CHUNK - 1) // _CHUNK, dtype=jnp.int32)
    initial = _initial_states(states, layer, slots, state_offset, num_computed)
    group = v.shape[1] // k.shape[1]
    # The last chunk may reach beyond the tokens.
    padded = [jnp.pad(x, ((0, _CHUNK),) + ((0, 0),) * (x.ndim - 1)) for x in (q, k, v, g, beta)]

    def take_chunk(chunk, carry):
        state, out, final = carry
        seq = jnp.searchsorted(chunks_end, chunk, side="right").astype(jnp.int32)
        seq = jnp.minimum(seq, seqs - 1)
        first = jnp.where(seq > 0, chunks_end[jnp.maximum(seq - 1, 0)], 0)
        begin = (chunk - first) * _CHUNK
        start = query_start[seq] + begin
        real = jnp.arange(_CHUNK, dtype=jnp.int32) < length[seq] - begin

        def taken(x):
            """The chunk, heads first; a padding token is all zeros, and so changes nothing."""
            x = jax.lax.dynamic_slice_in_dim(x, start, _CHUNK)
            return jnp.where(real.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0.0).swapaxes(0, 1)

        q_c, k_c, v_c, g_c, beta_c = map(taken, padded)
        q_c, k_c = (jnp.repeat(x, group, axis=0) for x in (q_c, k_c))
        state = jnp.where(begin == 0, initial[seq], state)
        new, state = _chunk(q_c, k_c, v_c, g_c, beta_c, state)
        old = jax.lax.dynamic_slice_in_dim(out, start, _CHUNK)
        new = jnp.where(real[:, None, None], new.swapaxes(0, 1), old)
        out = jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)
        return state, out, final.at[seq].set(state)

    carry = (jnp.zeros_like(initial[0]), jnp.zeros_like(padded[2]), initial)
    _, out, final = jax.lax.fori_loop(0, chunks_end[-1], take_chunk, carry)
    target = jnp.where(length > 0, slots, num_slots)
    states = states.at[layer, target, 0].set(final.astype(states.dtype), mode="drop")
    return out[:num_tokens], states


def _initial_states(states, layer, slots, state_offset, num_computed):
    initial = state_select(states, layer, slots, state_offset)
    fresh = (num_computed <= 0)[:, None, None, None]
    return jnp.where(fresh, 0.0, initial.astype(jnp.float32))


def _chunk(q, k, v, g, beta, state):
    """One chunk, arrays `[heads, tokens, ...]`: its outputs and the state after it."""
    size = g.shape[1]
    at_or_before = jnp.tril(jnp.ones((size, size), jnp.float32))
    before = jnp.tril(jnp.ones((size, size), jnp.float32), -1)
    # log_decay[t, i] = sum of g over i < j <= t, summed and not subtracted: terms of one sign lose
    # no digits, however fast the state decays. Zero above the diagonal, where it is masked below.
    log_decay = _product("tj,hj,ji->hti", at_or_before, g, before)
    decay = jnp.exp(log_decay) * at_or_before[None]
    from_start = jnp.exp(_product("tj,hj->ht", at_or_before, g))[..., None]

    mixing = beta[..., None] * decay * _product("htk,hik->hti", k, k) * before[None]
    wanted = beta[..., None] * (v - from_start * _product("htk,hvk->htv", k, state))
    system = mixing + jnp.eye(size, dtype=jnp.float32)[None]
    written = jax.lax.linalg.triangular_solve(
        system, wanted, left_side=True, lower=True, unit_diagonal=True
    )
    attention = decay * _product("htk,hik->hti", q, k)
    out = from_start * _product("htk,hvk->htv", q, state) + _product(
        "hti,hiv->htv", attention, written
    )
    to_end = decay[:, -1, :, None]
    state = from_start[:, -1:, :] * state + _product("htv,htk->hvk", written, to_end * k)
    return out, state


def _product(equation, *operands):
    return jnp.einsum(equation, *operands, precision="highest")


def gdn_prefill_reference(
    q, k, v, g, beta, states, layer, slots, state_offset, num_computed, query_start
):
    """The specification of `gdn_prefill`: one token after the other."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    num_tokens, seqs = q.shape[0], slots.shape[0]
    num_slots, group = states.shape[1], v.shape[1] // k.shape[1]
    length = query_start[1:] - query_start[:-1]
    live = (slots > 0) & (slots < num_slots) & (length > 0)
    initial = _initial_states(states, layer, slots, state_offset, num_computed)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    owner = jnp.clip(owner, 0, seqs - 1)
    real = (token >= query_start[0]) & (token < query_start[-1]) & live[owner]

    def take_token(current, at):
        q_t, k_t, v_t, g_t, beta_t, seq, is_real = at
        q_t, k_t = jnp.repeat(q_t, group, axis=0), jnp.repeat(k_t, group, axis=0)
        state = current[seq] * jnp.exp(g_t)[:, None, None]
        delta = beta_t[:, None] * (v_t - _product("hvk,hk->hv", state, k_t))
        state = state + delta[:, :, None] * k_t[:, None, :]
        out = _product("hvk,hk->hv", state, q_t)
        current = current.at[seq].set(jnp.where(is_real, state, current[seq]))
        return current, jnp.where(is_real, out, 0.0)

    final, out = jax.lax.scan(take_token, initial, (q, k, v, g, beta, owner, real))
    target = jnp.where(live, slots, num_slots)
    return out, states.at[layer, target, 0].set(final.astype(states.dtype), mode="drop")
