"""Tokens for Mamba2 as a layer makes them, and its recurrence in float64."""

import jax.numpy as jnp
import numpy as np

from benchmarks.measure.shapes import Mamba2Shape
from jaxspec.pallas.mamba2.heads import Mamba2Heads, Mamba2Params

SMALL = Mamba2Shape(6, 2, head_dim=5, state_dim=8)


def operands(rng, *batch, shape=SMALL):
    """x, dt, A, B, C, D as a layer makes them; all but A and D for tokens of this batch shape."""
    x = rng.normal(size=(*batch, shape.heads, shape.head_dim))
    dt = rng.exponential(size=(*batch, shape.heads)) * 0.5
    a, d = -rng.exponential(size=shape.heads) - 0.1, rng.normal(size=shape.heads)
    b, c = (rng.normal(size=(*batch, shape.groups, shape.state_dim)) for _ in range(2))
    c /= np.sqrt(shape.state_dim)
    return [y.astype(np.float32) for y in (x, dt, a, b, c, d)]


def oracle(state, x, dt, a, b, c, d):
    """Outputs and states after each token; `state` [heads, head_dim, state_dim]."""
    x, dt, a, b, c, d = (np.asarray(y, np.float64) for y in (x, dt, a, b, c, d))
    state, outputs, states = state.astype(np.float64), [], []
    group = x.shape[1] // b.shape[1]
    for t in range(len(x)):
        out = np.empty(x[t].shape)
        for head in range(x.shape[1]):
            decayed = np.exp(a[head] * dt[t, head]) * state[head]
            state[head] = decayed + dt[t, head] * np.outer(x[t, head], b[t, head // group])
            out[head] = state[head] @ c[t, head // group] + d[head] * x[t, head]
        outputs.append(out)
        states.append(state.copy())
    return np.array(outputs), np.array(states)


def heads_of(shape: Mamba2Shape) -> Mamba2Heads:
    return Mamba2Heads(shape.heads, shape.head_dim, shape.groups, shape.state_dim)


def projection(rng, shape, x, weight, bias=True):
    """A whole projection around the channels `x`, and parameters around the taps `weight`.

    NaN in columns that no op reads, and where a token's channels are NaN.
    """
    (rows, width, _), heads = x.shape, heads_of(shape)
    steps = 3 * rng.normal(size=(rows, width, heads.heads)) - 2
    steps = jnp.where(jnp.isnan(x[..., :1]), jnp.nan, jnp.asarray(steps, x.dtype))
    padding = -heads.columns % 64
    unread = [jnp.full((rows, width, size), jnp.nan, x.dtype) for size in (heads.features, padding)]
    params = Mamba2Params(
        conv=weight,
        bias=jnp.asarray(rng.normal(size=heads.channels), weight.dtype) if bias else None,
        rates=jnp.asarray(rng.normal(size=(heads.heads, 3)), jnp.float32),
        heads=heads,
    )
    return jnp.concatenate([x, unread[0], steps, unread[1]], axis=2), params
