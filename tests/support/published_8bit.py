"""Published matrices in 8 bits, and what NumPy makes of them in float64."""

import jax.numpy as jnp
import numpy as np

from jaxspec.weight import Float8Blocks, Float8Rows


def published(outer, inner, seed=0):
    """A matrix in float8_e4m3fn and its scales, which differ by a factor of 20 and more."""
    rng = np.random.default_rng((seed, outer, inner))
    array = jnp.asarray(rng.normal(size=(outer, inner)) * 60, jnp.float32)
    scale = np.exp(1.5 * rng.normal(size=(-(-outer // 128), -(-inner // 128)))) * inner**-0.5 / 60
    return array.astype(jnp.float8_e4m3fn), jnp.asarray(scale, jnp.float32)


def blocks_of(inner, *outers):
    """A weight of parts with so many columns, and their published matrices and scales."""
    parts = [published(outer, inner, seed) for seed, outer in enumerate(outers)]
    return Float8Blocks.of_parts(parts), parts


def rows_of(inner, outer):
    array, _ = published(outer, inner)
    scale = np.exp(np.random.default_rng(outer).normal(size=outer)) * inner**-0.5
    return Float8Rows(array, jnp.asarray(scale, jnp.float32))


def dequantised(parts):
    """`[inner, outer]` in float64, an entry's scale found by its place in its own part."""
    matrices = []
    for array, scale in parts:
        rows, columns = (np.arange(size) // 128 for size in array.shape)
        wide = np.asarray(array.astype(jnp.float32), np.float64)
        matrices.append(wide * np.asarray(scale, np.float64)[rows[:, None], columns])
    return np.concatenate(matrices).T


def dequantised_rows(weight):
    wide = np.asarray(weight.array.astype(jnp.float32), np.float64)
    return (wide * np.asarray(weight.scale, np.float64)[:, None]).T
