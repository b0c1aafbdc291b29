"""Exponentials for kernels compiled with `approx_math`, on float32 registers.

With `approx_math`, a kernel computes exp(x) as 2^(x log2 e), whose error grows with x, and its
log(1 + u) loses a small u. The functions below are accurate to a few units in the last place.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax


def exp(x: Any) -> Any:
    """Return `exp(max(x, -87))` (Cody and Waite 1980); the bits of 2^whole are set directly."""
    x = jnp.maximum(x, -87.0)
    whole = jnp.round(x * 1.4426950408889634)
    # log 2 is split into two parts, the first so short that its product with `whole` is exact.
    rest = (x - whole * 0.693359375) - whole * -2.12194440e-4
    power = lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return power * jnp.exp(rest)


def softplus(x: Any) -> Any:
    """`log(1 + exp(x)) = max(x, 0) + log1p(u)`, u = exp(-|x|), log1p(u) = 2 artanh(u / (2 + u))."""
    u = exp(-jnp.abs(x))
    s = u / (2.0 + u)  # at most 1/3, so terms after s^15 are below rounding
    square, series = s * s, 1 / 15
    for power in range(13, 0, -2):
        series = series * square + 1 / power
    return jnp.maximum(x, 0.0) + 2.0 * s * series


def sigmoid(x: Any) -> Any:
    u = exp(-jnp.abs(x))
    return jnp.where(x >= 0, 1.0, u) / (1.0 + u)
