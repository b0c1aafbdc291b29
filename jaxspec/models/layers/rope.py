"""Rotary position embedding: frequencies per model, angles per step.

`pallas/attention/inputs.py` applies the rotation.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.models.config import Llama3Scaling, ProportionalScaling, RopeConfig, YarnScaling
from jaxspec.pallas.attention.inputs import Rotation

_Channels = Float[Array, "tokens heads channels"]


@functools.cache
def frequencies(rope: RopeConfig) -> np.ndarray:
    """Return the radians per position of each channel pair, float32 `[rotary_dim / 2]`.

    Su et al. 2021, "RoFormer": pair `i` turns by `theta ** (-2 i / rotary_dim)`, then modified by
    `rope.scaling`.
    """
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    turns = rope.theta**-exponent
    if isinstance(rope.scaling, Llama3Scaling):
        turns = _scaled(turns, rope.scaling)
    elif isinstance(rope.scaling, ProportionalScaling):
        turns[rope.scaling.turning_pairs :] = 0.0
    elif rope.scaling is not None:
        turns = _extended(turns, rope, rope.scaling)
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


def _extended(turns: np.ndarray, rope: RopeConfig, scaling: YarnScaling) -> np.ndarray:
    """Keep fast pairs, divide slow ones by the factor, and interpolate by the index between them.

    YaRN's rule, `rope_type` "yarn" in Hugging Face's transformers.
    """
    first, last = (
        _pair_of(times, rope, scaling) for times in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    slow = np.clip((np.arange(len(turns)) - first) / max(last - first, 1e-3), 0, 1)
    return turns * (1 - slow + slow / scaling.factor)


def _pair_of(times: float, rope: RopeConfig, scaling: YarnScaling) -> float:
    """Return the fractional index of the pair with `times` turns in the original context."""
    per_turn = scaling.original_max_position_embeddings / (2 * math.pi * times)
    return rope.rotary_dim * math.log(per_turn) / (2 * math.log(rope.theta))


def rotation(positions: Int[Array, " tokens"], rope: RopeConfig) -> Rotation:
    """Return the cosines and sines of all tokens' angles, times `rope.magnitude`, in float32."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies(rope))[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if rope.magnitude == 1.0 else (cos * rope.magnitude, sin * rope.magnitude)


def rotate_halves(x: _Channels, turns: Rotation) -> _Channels:
    """Rotate the channel pairs (i, i + half) of the first channels of all heads, in float32."""
    cos, sin = (each[:, None] for each in turns)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([*_rotated(a, b, cos, sin), rest], axis=-1)


def rotate_pairs(x: _Channels, turns: Rotation) -> _Channels:
    """Rotate the channel pairs (2 i, 2 i + 1) of all heads, in float32; even ones then come first.

    Queries and keys have the same order, so their products are those of any order.
    """
    cos, sin = (each[:, None] for each in turns)
    return jnp.concatenate(_rotated(x[..., 0::2], x[..., 1::2], cos, sin), axis=-1)


def _rotated(a: Array, b: Array, cos: Array, sin: Array) -> list[Array]:
    dtype = a.dtype
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return [part.astype(dtype) for part in (a * cos - b * sin, b * cos + a * sin)]
