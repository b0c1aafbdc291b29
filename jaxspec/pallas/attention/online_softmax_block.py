"""Online softmax on tensor cores: one warpgroup, `ROWS` queries, one tile of positions at a time.

Symbols follow FlashAttention-2 (Dao 2023, algorithm 1). Scores are scaled to base 2, for `exp2`.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # queries per tile: the M of wgmma
LOG2E = math.log2(math.e)


class State(NamedTuple):
    """Running softmax over the positions processed so far."""

    acc: Any  # sum of the weighted values, `[queries, head_dim]`
    m_i: Any  # largest score, `[queries]`
    l_i: Any  # sum of the weights `exp2(score - m_i)`, `[queries]`


def empty(head_dim) -> State:
    column = plgpu.Layout.WGMMA.reduce(1)
    return State(
        full((ROWS, head_dim), 0.0, plgpu.Layout.WGMMA),
        full((ROWS,), -jnp.inf, column),
        full((ROWS,), 0.0, column),
    )


def update(state, scores, scale):
    """Return the bfloat16 weights of a tile of positions, and the state rescaled for them.

    The caller adds the weighted values to the new `acc`. `scores` are `[queries, positions]`, -inf
    where a query does not attend to a position.
    """
    acc, m_i, l_i = state
    m_new = jnp.maximum(m_i, scores.max(axis=1) * scale)
    m_safe = finite(m_new)
    weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(m_safe, scores.shape, (0,)))
    rescale = jnp.exp2(m_i - m_safe)
    acc = acc * lax.broadcast_in_dim(rescale, acc.shape, (0,))
    rounded = weights.astype(jnp.bfloat16)
    return rounded, State(acc, m_new, l_i * rescale + weights.sum(axis=1))


def finite(m_i):
    """Return a maximum that is safe to subtract: 0 for -inf, because -inf - -inf is NaN."""
    return jnp.where(m_i == -jnp.inf, 0.0, m_i)


def output(state, sink=None):
    """Return the attention output, 0 where no position was attended to.

    `sink` `[queries]`, if there is one, is one more score, to base e, whose value is zero.
    """
    acc, m_i, l_i = state
    if sink is not None:
        l_i = l_i + jnp.exp2(sink * LOG2E - finite(m_i))
    return acc * lax.broadcast_in_dim(1 / jnp.where(l_i == 0, 1.0, l_i), acc.shape, (0,))


def lse(state):
    """Return the base-2 log-sum-exp of all scores, -inf where no position was attended to."""
    _, m_i, l_i = state
    return m_i + jnp.log(jnp.where(l_i == 0, 1.0, l_i)) * LOG2E


def tile_iota(block_kv, dimension):
    """Return the row (`dimension` 0) or the position (1) of each score of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, block_kv), dimension, layout=plgpu.Layout.WGMMA)


def full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
