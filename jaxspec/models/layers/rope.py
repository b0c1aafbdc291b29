"""Rotary position embedding: frequencies once a model, angles once a step.

`pallas/attention/inputs.py` rotates.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.models.config import RopeConfig
from jaxspec.pallas.attention.inputs import Rotation


@functools.cache
def frequencies(rope: RopeConfig) -> np.ndarray:
    """float32 `[rotary_dim / 2]`: radians that each pair of channels turns from token to token.

    Su et al. 2021, "RoFormer": pair `i` turns by `theta ** (-2 i / rotary_dim)`.
    """
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    turns = (rope.theta**-exponent).astype(np.float32)
    turns.flags.writeable = False  # it is shared by all that ask for it
    return turns


def rotation(positions: Int[Array, " tokens"], frequencies: Float[np.ndarray, " half"]) -> Rotation:
    """float32 cosines and sines of every token's angles, `positions * frequencies`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(angles), jnp.sin(angles)
