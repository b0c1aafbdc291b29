"""What attention on tensor cores is made of: one warpgroup, `ROWS` queries, tiles of positions.

Dao 2023, "FlashAttention-2". The state of a softmax that has seen some positions is `acc` (what its
weights take from the values), `peak` (the largest score) and `total` (the sum of the weights); the
weights are relative to the peak, and scores in units of log2.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # what wgmma takes
LOG2E = math.log2(math.e)


def empty(head_dim):
    """The state before any position."""
    column = plgpu.Layout.WGMMA.reduce(1)
    return (
        full((ROWS, head_dim), 0.0, plgpu.Layout.WGMMA),
        full((ROWS,), -jnp.inf, column),
        full((ROWS,), 0.0, column),
    )


def weigh(state, scores, scale):
    """The weights of a tile of positions, and the state but for what they take from its values."""
    acc, peak, total = state
    new = jnp.maximum(peak, scores.max(axis=1) * scale)
    safe = jnp.where(new == -jnp.inf, 0.0, new)
    weight = jnp.exp2(scores * scale - lax.broadcast_in_dim(safe, scores.shape, (0,)))
    fade = jnp.exp2(peak - safe)
    acc = acc * lax.broadcast_in_dim(fade, acc.shape, (0,))
    return weight.astype(jnp.bfloat16), (acc, new, total * fade + weight.sum(axis=1))


def result(state):
    """The attention's output, 0 where no position was seen."""
    acc, _, total = state
    return acc * lax.broadcast_in_dim(1 / jnp.where(total == 0, 1.0, total), acc.shape, (0,))


def iota(keys, dimension):
    """Row (`dimension` 0) or position (1) of each score of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), dimension, layout=plgpu.Layout.WGMMA)


def full(shape, value, layout):
    """An array of one value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
