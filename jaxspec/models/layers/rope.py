"""Rotary position embedding: frequencies once a model, angles once a step.

`pallas/attention/inputs.py` rotates.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.models.config import Llama3Scaling, RopeConfig
from jaxspec.pallas.attention.inputs import Rotation


@functools.cache
def frequencies(rope: RopeConfig) -> np.ndarray:
    """float32 `[rotary_dim / 2]`: radians that each pair of channels turns from token to token.

    Su et al. 2021, "RoFormer": pair `i` turns by `theta ** (-2 i / rotary_dim)`; then
    `rope.scaling` changes that.
    """
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    turns = rope.theta**-exponent
    if rope.scaling is not None:
        turns = _scaled(turns, rope.scaling)
    turns = turns.astype(np.float32)
    turns.flags.writeable = False  # it is shared by all that ask for it
    return turns


def _scaled(turns: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Fast pairs as they are, slow ones divided by the factor, and a line between the two.

    Llama 3.1's rule, as `rope_type` "llama3" of Hugging Face's transformers states it.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    times = turns * scaling.original_max_position_embeddings / (2 * math.pi)
    kept = np.clip((times - low) / (high - low), 0, 1)
    return turns * (kept + (1 - kept) / scaling.factor)


def rotation(positions: Int[Array, " tokens"], frequencies: Float[np.ndarray, " half"]) -> Rotation:
    """float32 cosines and sines of every token's angles, `positions * frequencies`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(angles), jnp.sin(angles)
