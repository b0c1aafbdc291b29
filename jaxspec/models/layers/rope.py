"""The angles of rotary position embedding; `pallas/attention/inputs.py` rotates."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.pallas.attention.inputs import Rotation


def rotation(positions: Int[Array, " tokens"], rotary_dim: int, theta: float) -> Rotation:
    """float32 cosines and sines of every token's angles, once a step for all layers.

    Su et al. 2021, "RoFormer". Angle `i` of position `p` is `p * theta ** (-2 i / rotary_dim)`.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies = jnp.asarray((theta**-exponent).astype(np.float32))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)
