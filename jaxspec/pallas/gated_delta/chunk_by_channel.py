"""One chunk of the gated delta rule with a decay by channel, in XLA.

A product of a key and a later key or query is decayed channel by channel (Kimi Team 2025, "Kimi
Linear", arXiv 2510.26692, section 3.1):

    a[t, i] = sum_c x_t[c] k_i[c] exp(G_t[c] - G_i[c])

`exp(-G_i)` may overflow, so the exponent is split at a token `m` between the two: `G_t - G_m` and
`G_m - G_i` are sums of terms of one sign, and no exponential is above 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.recurrent.chunks import product, unit_lower_inverse

_Vectors = Float[Array, "heads tokens key_dim"]


def chunk_by_channel(
    tokens: GdnTokens, state: Float[Array, "heads value_dim key_dim"]
) -> tuple[Float[Array, "heads value_dim key_dim"], Float[Array, "heads tokens value_dim"]]:
    """Return the state after a chunk, and its outputs; arrays are `[heads, tokens, ...]`."""
    q, k, v, g, beta = tokens
    from_start, to_end = jnp.exp(_sums_until(g)), jnp.exp(_sums_after(g))
    mixing = beta[..., None] * jnp.tril(decayed_products(k, k, g), -1)
    wanted = beta[..., None] * (v - product("htk,hvk->htv", from_start * k, state))
    written = product("hti,hiv->htv", unit_lower_inverse(mixing), wanted)
    out = product("htk,hvk->htv", from_start * q, state)
    out = out + product("hti,hiv->htv", decayed_products(q, k, g), written)
    added = product("htv,htk->hvk", written, to_end * k)
    return from_start[:, -1:] * state + added, out


def decayed_products(x: _Vectors, k: _Vectors, g: _Vectors) -> Float[Array, "heads tokens tokens"]:
    """Return the products `a[t, i]` for `i <= t`, else 0; the number of tokens is a power of two.

    Products across the middle are one matmul. Those within the halves are computed likewise, for
    both halves at once, as if they were different heads.
    """
    half = x.shape[1] // 2
    if not half:
        return jnp.sum(x * k, axis=2)[..., None]
    halves = [jnp.concatenate([a[:, :half], a[:, half:]]) for a in (x, k, g)]
    first, second = jnp.split(decayed_products(*halves), 2)
    late = x[:, half:] * jnp.exp(_sums_until(g[:, half:]))
    early = k[:, :half] * jnp.exp(_sums_after(g[:, :half]))
    across = product("htk,hik->hti", late, early)
    upper = jnp.concatenate([first, jnp.zeros_like(across)], axis=2)
    return jnp.concatenate([upper, jnp.concatenate([across, second], axis=2)], axis=1)


def _sums_until(g: _Vectors) -> _Vectors:
    """Return for each token the sum over the tokens up to it, itself included."""
    return _masked_sums(g, jnp.tri(g.shape[1], dtype=bool))


def _sums_after(g: _Vectors) -> _Vectors:
    """Return for each token the sum over the tokens after it."""
    return _masked_sums(g, ~jnp.tri(g.shape[1], dtype=bool))


def _masked_sums(g, mask):
    return jnp.sum(jnp.where(mask[None, :, :, None], g[:, None], 0.0), axis=2)
