"""Tokens for Gated DeltaNet as a layer makes them, and its recurrence in float64."""

import jax.numpy as jnp
import numpy as np

from benchmarks.measure.shapes import GdnShape

SMALL = GdnShape(2, 6, key_dim=8, value_dim=5)


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


def oracle(state, q, k, v, g, beta):
    """Outputs and states after each token; `state` [value_heads, value_dim, key_dim]."""
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


def assert_rounding_does_not_add_up(outs, tokens, kept, error):
    """Outputs `[steps, width, value_heads, value_dim]` of a row, from no state, against float64.

    `tokens`: q, k, v, g and beta `[steps, 1, width, ...]`; the first `kept` of each step stand. The
    relative error is below `error` in each quarter, and hardly more in the last than in the first.
    """
    heads, value_dim = outs.shape[2:]
    exact, wrong, right = np.zeros((heads, value_dim, tokens[1].shape[-1])), [], []
    for out, *x, stand in zip(np.asarray(outs, np.float64), *tokens, kept, strict=True):
        expected, after = oracle(exact, *(y[0] for y in x))
        wrong.append(np.linalg.norm(out - expected))
        right.append(np.linalg.norm(expected))
        exact = after[stand - 1]
    quarters = [np.sqrt(np.mean(np.square(x))) for x in np.array_split(wrong, 4)]
    assert max(quarters) < error * np.sqrt(np.mean(np.square(right)))
    assert quarters[-1] < 1.5 * quarters[0]


def gated_norm(heads, norm):
    """The outputs of `GatedNorm` for heads, computed in float64 and then rounded."""
    x, weight = (np.asarray(a, np.float64) for a in (heads, norm.weight))
    gate = np.asarray(norm.gates, np.float64)[:, norm.first : norm.first + x[0].size]
    gate = gate.reshape(x.shape)
    x = x / np.sqrt((x**2).mean(axis=2, keepdims=True) + norm.eps) * weight
    x = x * gate / (1 + np.exp(-gate))
    return x.reshape(len(x), -1).astype(norm.gates.dtype).astype(np.float64)
