"""Stacks of experts' matrices in 8 bits, and the same in float64."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import Experts
from jaxspec.weight import DenseExperts, Float8BlockExperts, Float8RowExperts


def block_experts(number, outer, inner, seed=0):
    """Matrices of experts, and the same in float64, an entry's scale found by its place."""
    rng = np.random.default_rng((seed, outer, inner))
    array = jnp.asarray(rng.normal(size=(number, outer, inner)) * 60, jnp.float32)
    shape = number, -(-outer // 64), -(-inner // 128)
    scale = jnp.asarray(np.exp(rng.normal(size=shape) / 4) * inner**-0.5 / 60, jnp.float32)
    weight = Float8BlockExperts(array.astype(jnp.float8_e4m3fn), scale)
    rows, columns = np.arange(outer) // 64, np.arange(inner) // 128
    wide = np.asarray(weight.array.astype(jnp.float32), np.float64)
    return weight, wide * np.asarray(scale, np.float64)[:, rows[:, None], columns]


def row_experts(number, outer, inner, seed=0):
    """Matrices of experts with a scale per column, and the same in float64."""
    rng = np.random.default_rng((seed, outer, inner))
    array = jnp.asarray(rng.normal(size=(number, outer, inner)) * 60, jnp.float32)
    scale = np.exp(rng.normal(size=(number, outer)) / 4) * inner**-0.5 / 60
    weight = Float8RowExperts(array.astype(jnp.float8_e4m3fn), jnp.asarray(scale, jnp.float32))
    wide = np.asarray(weight.array.astype(jnp.float32), np.float64)
    return weight, wide * np.asarray(weight.scale, np.float64)[:, :, None]


def experts_of(kind, number, features, inner, activation=Activation.SWIGLU):
    """Experts whose stacks `kind` draws, and the same in float64 for the oracle.

    The matrices are padded with zeros to whole chunks of 128 features.
    """
    up, wide_up = kind(number, activation.pieces * inner, features)
    down, wide_down = kind(number, features, inner, 1)
    up, down = (
        each.replace(array=jnp.pad(each.array, ((0, 0), (0, 0), (0, -each.inner % 128))))
        for each in (up, down)
    )
    wide = Experts(DenseExperts(wide_up), DenseExperts(wide_down), activation)
    return Experts(up, down, activation), wide
