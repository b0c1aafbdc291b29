"""Published matrices in 4 bits, and what NumPy makes of them in float64."""

import jax.numpy as jnp
import numpy as np
from sm90 import array

from jaxspec.weight import Float4Groups, Int4Groups, pack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def int4_of(inner, outer, group=128, *, has_zeros=False, seed=0):
    """Integers with all zero points and scales that differ, and the same as `[inner, outer]`."""
    rng = np.random.default_rng((seed, inner, outer, group))
    numbers = rng.integers(0, 16, (outer, inner), np.uint8)
    zero = rng.integers(0, 16, (inner // group, outer), np.uint8)
    scale = np.exp(rng.normal(size=(inner // group, outer))) * inner**-0.5 / 8
    scale = scale.astype(np.float32)
    points = zero[:, None].astype(np.float64) if has_zeros else np.float64(8)
    wide = numbers.T.reshape(inner // group, group, outer) - points
    weight = Int4Groups(
        jnp.asarray(pack(numbers)), jnp.asarray(scale), jnp.asarray(zero) if has_zeros else None
    )
    return weight, (wide * scale[:, None].astype(np.float64)).reshape(inner, outer)


def float4_of(inner, outer, seed=0):
    """Numbers in FP4 with scales of all sizes, and the same as `[inner, outer]`."""
    rng = np.random.default_rng((seed, inner, outer))
    numbers = rng.integers(0, 16, (outer, inner), np.uint8)
    scale = jnp.asarray(2.0 ** rng.uniform(-9, 8.8, (inner // 16, outer)), jnp.float8_e4m3fn)
    factor = np.exp(rng.normal(size=outer)).astype(np.float32) * 2.0**-14
    values = np.concatenate([E2M1, -E2M1])[numbers].T.reshape(inner // 16, 16, outer)
    wide = (values * np.asarray(scale, np.float64)[:, None]).reshape(inner, outer)
    return Float4Groups(jnp.asarray(pack(numbers)), scale, jnp.asarray(factor)), wide * factor


def abstract_4_bits(kind, inner, outer):
    """A matrix without values; `kind` is "nvfp4", or a group, and whether it has zero points."""
    numbers = array(outer, inner // 4, dtype=jnp.uint16)
    if kind == "nvfp4":
        scale = array(inner // 16, outer, dtype=jnp.float8_e4m3fn)
        return Float4Groups(numbers, scale, array(outer))
    group, has_zeros = kind
    zero = array(inner // group, outer, dtype=jnp.uint8) if has_zeros else None
    return Int4Groups(numbers, array(inner // group, outer), zero)
