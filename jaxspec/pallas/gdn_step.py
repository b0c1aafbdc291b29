"""One verify step of Gated DeltaNet: a few tokens a row, the state after each one kept."""

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
    return gdn_step_reference(q, k, v, g, beta, states, layer, slots, state_offset, query_len)


def gdn_step_reference(q, k, v, g, beta, states, layer, slots, state_offset, query_len):
    """The specification of `gdn_step`: one token after the other."""
    _, num_slots, candidates, value_heads = states.shape[:4]
    width, group = q.shape[1], value_heads // q.shape[2]
    if candidates < width:
        raise ValueError(
            f"A slot must hold one state for each of the {width} tokens of a row, but the pool "
            f"has {candidates} a slot. Build the cache with num_drafts >= {width - 1}."
        )
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

    token = jnp.arange(width, dtype=jnp.int32)[None, :]
    real = (token < query_len[:, None]) & (slots > 0)[:, None]
    target = jnp.where(real, slots[:, None], num_slots)
    after = jnp.stack(after, axis=1).astype(states.dtype)
    return jnp.stack(outputs, axis=1), states.at[layer, target, token].set(after, mode="drop")
