"""One verify step of Gated DeltaNet: a few tokens a row, the state after each one kept."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.recurrent.state_select import state_select_reference, state_write_reference

_States = Float[Array, "layers slots candidates value_heads value_dim key_dim"]


def gdn_step(
    q: Float[Array, "rows width key_heads key_dim"],
    k: Float[Array, "rows width key_heads key_dim"],
    v: Float[Array, "rows width value_heads value_dim"],
    g: Float[Array, "rows width value_heads"],
    beta: Float[Array, "rows width value_heads"],
    states: _States,
    layer: int,
    slots: Int[Array, " rows"],
    state_offset: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
) -> tuple[Float[Array, "rows width value_heads value_dim"], _States]:
    """The gated delta rule over each row's tokens: float32 outputs, and the new pool.

    Per token and value head, with `S [value_dim, key_dim]` in float32 (Yang et al. 2024, "Gated
    Delta Networks", arXiv 2412.06464, equation 10):

        S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = S q

    `q`, `k` (normalised and scaled by the caller), `v`, `g` (log decay, at most 0) and `beta` are
    float32; value head `h` uses key head `h // (value_heads // key_heads)`. The first state is the
    slot's candidate `state_offset`; the state after token `t` becomes candidate `t` for
    `t < query_len`. So rolling back to `a` accepted drafts is reading candidate `a` next time.
    Needs `candidates >= width` (ValueError). Padding rows and tokens write nothing, and what they
    put out means nothing.

    Of states in 16 bits, too, the kernel multiplies and adds in float32: no tensor cores, which
    would hardly help (at 64 rows of 4 tokens it moves its bytes at 87 % of a copy's speed).
    """
    width, candidates = q.shape[1], states.shape[2]
    if candidates < width:
        raise ValueError(
            f"A slot must hold one state for each of the {width} tokens of a row, but the pool "
            f"has {candidates} a slot. Build the cache with num_drafts >= {width - 1}."
        )
    if dispatch.runs_kernel("gdn_step", _unsupported(width, states)):
        from jaxspec.pallas.gated_delta.step_kernel import gdn_step_kernel

        on_device = dispatch.layer_index(states, layer)
        return gdn_step_kernel(q, k, v, g, beta, states, on_device, slots, state_offset, query_len)
    if width > 1:
        return _gdn_step_together(q, k, v, g, beta, states, layer, slots, state_offset, query_len)
    return gdn_step_reference(q, k, v, g, beta, states, layer, slots, state_offset, query_len)


def gdn_step_reference(q, k, v, g, beta, states, layer, slots, state_offset, query_len):
    """The specification of `gdn_step`: one token after the other."""
    width, group = q.shape[1], states.shape[3] // q.shape[2]
    state = state_select_reference(states, layer, slots, state_offset).astype(jnp.float32)

    outputs, after = [], []
    for t in range(width):
        q_t, k_t = (jnp.repeat(x[:, t], group, axis=1) for x in (q, k))
        state = state * jnp.exp(g[:, t])[..., None, None]
        recalled = jnp.einsum("rhvk,rhk->rhv", state, k_t, precision="highest")
        delta = beta[:, t][..., None] * (v[:, t] - recalled)
        state = state + delta[..., None] * k_t[..., None, :]
        outputs.append(jnp.einsum("rhvk,rhk->rhv", state, q_t, precision="highest"))
        after.append(state)

    states = state_write_reference(states, layer, slots, query_len, jnp.stack(after, axis=1))
    return jnp.stack(outputs, axis=1), states


def _gdn_step_together(q, k, v, g, beta, states, layer, slots, state_offset, query_len):
    """`gdn_step` for XLA, all tokens at once."""
    state = state_select_reference(states, layer, slots, state_offset).astype(jnp.float32)
    group = states.shape[3] // q.shape[2]
    q, k = (jnp.moveaxis(jnp.repeat(x, group, axis=2), 1, 2) for x in (q, k))
    v, g, beta = (jnp.moveaxis(x, 1, 2) for x in (v, g, beta))
    # A draft may overflow, padding hold anything, and 0 times NaN is NaN: none before may see it.
    finite = jnp.isfinite(k).all(axis=3) & jnp.isfinite(v).all(axis=3) & jnp.isfinite(beta)
    sound = jnp.cumprod(finite & ~jnp.isnan(g), axis=2) > 0
    k, v = (jnp.where(sound[..., None], x, 0.0) for x in (k, v))
    g, beta = (jnp.where(sound, x, 0.0) for x in (g, beta))
    outputs, after = _all_tokens(q, k, v, g, beta, state)
    outputs = jnp.where(sound[..., None], outputs, jnp.nan)
    after = jnp.where(sound[..., None, None], after, jnp.nan)
    states = state_write_reference(states, layer, slots, query_len, jnp.moveaxis(after, 2, 1))
    return jnp.moveaxis(outputs, 2, 1), states


def _all_tokens(
    q: Float[Array, "rows heads width key_dim"],
    k: Float[Array, "rows heads width key_dim"],
    v: Float[Array, "rows heads width value_dim"],
    g: Float[Array, "rows heads width"],
    beta: Float[Array, "rows heads width"],
    state: Float[Array, "rows heads value_dim key_dim"],
) -> tuple[Array, Array]:
    """Outputs, and the states after each token `[rows, heads, width, value_dim, key_dim]`.

    Not token by token, where XLA computes every state anew from the first on wherever it is used,
    but with the updates `u_t` of all tokens solved at once (paper, section 3.3). With `G` the
    running sum of `g` and `D[t, i] = exp(G_t - G_i)` for `i <= t`, else 0:

        S_t = exp(G_t) S_0 + sum_i D[t, i] u_i k_i^T
        u_t = beta_t (v_t - exp(G_t) S_0 k_t - sum_{i<t} D[t, i] (k_i . k_t) u_i)
    """
    width = q.shape[2]
    dot = functools.partial(jnp.einsum, precision="highest")
    # G_t - G_i as a sum of its own: a difference of the two would lose what follows a strong decay.
    t, i, j = (jnp.arange(width).reshape(shape) for shape in ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))
    between = jnp.broadcast_to((i < j) & (j <= t), (*g.shape[:2], width, width, width))
    since = jnp.sum(jnp.where(between, g[:, :, None, None, :], 0.0), axis=4)
    decay = jnp.tril(jnp.exp(since))
    kept = jnp.exp(jnp.cumsum(g, axis=2))[..., None]

    both = jnp.concatenate([k, q], axis=2)
    from_state = jnp.swapaxes(dot("rhvk,rhkt->rhvt", state, jnp.swapaxes(both, 2, 3)), 2, 3)
    overlap = dot("rhtk,rhik->rhti", both, k)
    among_keys, among_queries = overlap[:, :, :width], overlap[:, :, width:]
    wanted = beta[..., None] * (v - kept * from_state[:, :, :width])
    coupling = jnp.tril(beta[..., None] * decay * among_keys, -1)
    updates = dot("rhti,rhiv->rhtv", _inverse(coupling), wanted)

    outputs = kept * from_state[:, :, width:]
    outputs = outputs + dot("rhti,rhiv->rhtv", decay * among_queries, updates)
    decayed = decay[:, :, :, None, :] * jnp.swapaxes(updates, 2, 3)[:, :, None]
    added = dot("rhtvi,rhik->rhtvk", decayed, k)
    return outputs, kept[..., None] * state[:, :, None] + added


def _inverse(strictly_lower: Float[Array, "... n n"]) -> Float[Array, "... n n"]:
    """`(1 + A)^-1 = (1 - A)(1 + A^2)(1 + A^4)...`, which ends since `A^n = 0`."""

    def times(a, b):  # elementwise: a matmul this small costs more to call than to do
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)

    n = strictly_lower.shape[-1]
    one = jnp.broadcast_to(jnp.eye(n, dtype=strictly_lower.dtype), strictly_lower.shape)
    power, inverse, reach = -strictly_lower, one - strictly_lower, 2
    while reach < n:
        power = times(power, power)
        inverse = times(inverse, one + power)
        reach *= 2
    return inverse


def _unsupported(width, states):
    """Why `gdn_step_kernel` does not take these operands, or None."""
    value_dim, key_dim = states.shape[4:]
    if width > 8:
        return f"{width} tokens a row, more than 8"
    if states.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"states in {states.dtype}"
    if value_dim not in (64, 128) or key_dim not in (64, 128):
        return f"heads of {value_dim} x {key_dim}, not 64 or 128"
    return None
