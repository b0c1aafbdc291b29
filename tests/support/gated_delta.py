"""Tokens for the gated delta rule as layers make them, and its recurrence in float64."""

import jax.numpy as jnp
import numpy as np

from benchmarks.measure.shapes import GdnShape
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams

SMALL = GdnShape(2, 6, key_dim=8, value_dim=5)
SMALL_BY_CHANNEL = GdnShape(3, 3, key_dim=8, value_dim=5)


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def operands(rng, *batch, shape=SMALL):
    """q, k, v, g, beta for tokens of the given batch shape, as a layer makes them."""
    q, k = (rng.normal(size=(*batch, shape.key_heads, shape.key_dim)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(*batch, shape.value_heads, shape.value_dim))
    g = -rng.exponential(size=(*batch, shape.value_heads))
    beta = rng.random(size=(*batch, shape.value_heads))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def operands_by_channel(rng, *batch, shape=SMALL_BY_CHANNEL):
    """Likewise with a decay for each key channel."""
    q, k, v, _, beta = operands(rng, *batch, shape=shape)
    g = -rng.exponential(size=(*batch, shape.value_heads, shape.key_dim))
    return [q, k, v, g.astype(np.float32), beta]


def oracle(state, q, k, v, g, beta):
    """Outputs and states after each token; `state` [value_heads, value_dim, key_dim].

    `g` has a decay for each head, or for each of a head's key channels.
    """
    state, outputs, states = state.astype(np.float64), [], []
    group = v.shape[1] // k.shape[1]
    for t in range(len(q)):
        out = np.empty(v[t].shape)
        for head in range(v.shape[1]):
            key, query = k[t, head // group], q[t, head // group]
            decayed = np.exp(np.float64(g[t, head])) * state[head]
            write = beta[t, head] * (v[t, head] - decayed @ key)
            state[head] = decayed + np.outer(write, key)
            out[head] = state[head] @ query
        outputs.append(out)
        states.append(state.copy())
    return np.array(outputs), np.array(states)


def heads_of(shape: GdnShape) -> GdnHeads:
    return GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)


def projection(rng, shape, x, weight):
    """A whole projection around the channels `x`, and parameters around the taps `weight`.

    NaN in columns that no op reads, and where a token's channels are NaN.
    """
    rows, width, _ = x.shape
    heads, features = shape.value_heads, shape.value_heads * shape.value_dim
    unread = jnp.full((rows, width, features), jnp.nan, x.dtype)
    gates = jnp.asarray(6 * rng.normal(size=(rows, width, 2 * heads)), x.dtype)
    gates = jnp.where(jnp.isnan(x[..., :1]), jnp.nan, gates)
    decay = jnp.asarray(rng.normal(size=(heads, 2)), jnp.float32)
    params = GdnParams(weight, decay, heads_of(shape))
    return jnp.concatenate([x, unread, gates, unread[..., :8]], axis=2), params


def gated_norm(heads, norm):
    """The outputs of `GatedNorm` for heads, computed in float64 and then rounded."""
    x, weight = (np.asarray(a, np.float64) for a in (heads, norm.weight))
    gate = np.asarray(norm.gates, np.float64)[:, norm.first : norm.first + x[0].size]
    gate = gate.reshape(x.shape)
    x = x / np.sqrt((x**2).mean(axis=2, keepdims=True) + norm.eps) * weight
    x = x * (gate if norm.gate == "silu" else 1) / (1 + np.exp(-gate))
    return x.reshape(len(x), -1).astype(norm.gates.dtype).astype(np.float64)
