"""Rotary position embedding: frequencies per model, angles per step.

`pallas/attention/inputs.py` applies the rotation.
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
    """Return the radians per position of each channel pair, float32 `[rotary_dim / 2]`.

    Su et al. 2021, "RoFormer": pair `i` turns by `theta ** (-2 i / rotary_dim)`, then modified by
    `rope.scaling`.
    """
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    turns = rope.theta**-exponent
    if rope.scaling is not None:
        turns = _scaled(turns, rope.scaling)
    turns = turns.astype(np.float32)
    turns.flags.writeable = False  # the cache shares it
    return turns


def _scaled(turns: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Keep fast pairs, divide slow ones by the factor, and interpolate between them.

    Llama 3.1's rule, `rope_type` "llama3" in Hugging Face's transformers.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    times = turns * scaling.original_max_position_embeddings / (2 * math.pi)
    kept = np.clip((times - low) / (high - low), 0, 1)
    return turns * (kept + (1 - kept) / scaling.factor)


def rotation(positions: Int[Array, " tokens"], frequencies: Float[np.ndarray, " half"]) -> Rotation:
    """Return the float32 cosines and sines of all tokens' angles, `positions * frequencies`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(angles), jnp.sin(angles)
