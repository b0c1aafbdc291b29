"""Rotary position embedding."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Rotation = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]


def rotation(positions: Int[Array, " tokens"], rotary_dim: int, theta: float) -> Rotation:
    """float32 cosines and sines of every token's angles, once a step for all layers.

    Su et al. 2021, "RoFormer". Angle `i` of position `p` is `p * theta ** (-2 i / rotary_dim)`.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies = jnp.asarray((theta**-exponent).astype(np.float32))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "tokens heads dim"], angles: Rotation
) -> Float[Array, "tokens heads dim"]:
    """`x` with its first `2 * half` channels rotated, pairs `(i, i + half)`; the rest untouched."""
    cos, sin = (a[:, None, :] for a in angles)
    half = cos.shape[-1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
