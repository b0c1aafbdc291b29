"""One verify step of Gated DeltaNet: a few tokens a row, the state after each one kept."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.state_select import state_select

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
    Needs `candidates >= width` (ValueError). Padding rows and tokens write nothing.
    """
    _check_width(q.shape[1], states.shape[2])
    if q.shape[1] == 1:  # nothing to solve
        return gdn_step_reference(q, k, v, g, beta, states, layer, slots, state_offset, query_len)
    state = state_select(states, layer, slots, state_offset).astype(jnp.float32)
    group = states.shape[3] // q.shape[2]
    q, k = (jnp.moveaxis(jnp.repeat(x, group, axis=2), 1, 2) for x in (q, k))
    v, g, beta = (jnp.moveaxis(x, 1, 2) for x in (v, g, beta))
    # A padding token may hold anything, and 0 times a NaN is one.
    live = jnp.arange(q.shape[2])[None, None, :] < query_len[:, None, None]
    k, v = (jnp.where(live[..., None], x, 0.0) for x in (k, v))
    g, beta = (jnp.where(live, x, 0.0) for x in (g, beta))
    outputs, after = _all_tokens(q, k, v, g, beta, state)
    states = _write(states, layer, slots, query_len, jnp.moveaxis(after, 2, 1))
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
    total = jnp.cumsum(g, axis=2)
    since = total[:, :, :, None] - total[:, :, None, :]
    decay = jnp.tril(jnp.exp(jnp.minimum(since, 0.0)))  # above the diagonal it could overflow
    kept = jnp.exp(total)[..., None]

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
    n = strictly_lower.shape[-1]
    one = jnp.broadcast_to(jnp.eye(n, dtype=strictly_lower.dtype), strictly_lower.shape)
    power, inverse, reach = -strictly_lower, one - strictly_lower, 2
    while reach < n:
        power = jnp.matmul(power, power, precision="highest")
        inverse = jnp.matmul(inverse, one + power, precision="highest")
        reach *= 2
    return inverse


def gdn_step_reference(q, k, v, g, beta, states, layer, slots, state_offset, query_len):
    """The specification of `gdn_step`: one token after the other."""
    width, group = q.shape[1], states.shape[3] // q.shape[2]
    _check_width(width, states.shape[2])
    state = state_select(states, layer, slots, state_offset).astype(jnp.float32)
    outputs, after = [], []
    for t in range(width):
        q_t, k_t = (jnp.repeat(x[:, t], group, axis=1) for x in (q, k))
        state = state * jnp.exp(g[:, t])[..., None, None]
        recalled = jnp.einsum("rhvk,rhk->rhv", state, k_t, precision="highest")
        delta = beta[:, t][..., None] * (v[:, t] - recalled)
        state = state + delta[..., None] * k_t[..., None, :]
        outputs.append(jnp.einsum("rhvk,rhk->rhv", state, q_t, precision="highest"))
        after.append(state)

    return jnp.stack(outputs, axis=1), _write(
        states, layer, slots, query_len, jnp.stack(after, axis=1)
    )


def _check_width(width: int, candidates: int) -> None:
    if candidates < width:
        raise ValueError(
            f"A slot must hold one state for each of the {width} tokens of a row, but the pool "
            f"has {candidates} a slot. Build the cache with num_drafts >= {width - 1}."
        )


def _write(
    states: _States,
    layer: int,
    slots: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    after: Float[Array, "rows width value_heads value_dim key_dim"],
) -> _States:
    """The pool with each live token's state as its candidate."""
    token = jnp.arange(after.shape[1], dtype=jnp.int32)[None, :]
    real = (token < query_len[:, None]) & (slots > 0)[:, None]
    target = jnp.where(real, slots[:, None], states.shape[1])
    return states.at[layer, target, token].set(after.astype(states.dtype), mode="drop")
