"""Gumbel noise of an id, derived from its row's key: elementwise, for XLA and for kernels."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

# Odd multipliers of avalanching hashes: Knuth's golden ratio, then those of Wellons' triple32
# (github.com/skeeto/hash-prospector).
_GOLDEN, _FIRST, _SECOND, _THIRD = 0x9E3779B9, 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB

_TWO_THIRDS, _EXPONENT = 0x3F2AAAAB, -0x0080_0000  # float32 bits: 2/3, and a mask
_LOG_2 = math.log(2) * 2.0**-23
_SERIES = (  # (log(1 + t) - t) / t**2 between -1/3 and 1/3, as in CUDA's libdevice
    -0.13018857,
    0.14084610,
    -0.12148628,
    0.13980611,
    -0.16684236,
    0.20012300,
    -0.24999669,
    0.33333182,
    -0.5,
)


class RowKeys(NamedTuple):
    """Key of each row's noise: 64 random bits."""

    first: UInt32[Array, "*rows"]
    second: UInt32[Array, "*rows"]


def random_bits(keys: RowKeys, ids: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return 32 random bits per id, a function of the row's key and the id.

    A counter-based generator: multiplications and shifts mix the id with both halves of the key.
    `keys` and `ids` broadcast. It takes about 15 instructions; threefry takes 80.
    """
    x = ids * jnp.uint32(_GOLDEN) + keys.first
    x = (x ^ (x >> 17)) * jnp.uint32(_FIRST) + keys.second
    x = (x ^ (x >> 11)) * jnp.uint32(_SECOND)
    x = (x ^ (x >> 15)) * jnp.uint32(_THIRD)
    return x ^ (x >> 14)


def open_uniform(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Map each 32 random bits to a uniform number (float32) in the open interval (0, 1)."""
    # 32 bits, not 23 as in jax.random.uniform: a vocabulary has up to 2**18 ids, and a 0 would
    # accept a draft of probability 0. The largest values round to 1, hence the minimum.
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)


def gumbel(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Map each 32 random bits to standard Gumbel noise (float32, finite)."""
    uniform = open_uniform(bits)
    rest = 1.0 - uniform
    # The smallest uniforms give the largest noise, which decides the draw, but `rest` rounds them
    # away. Adding the rounding error back gives log1p to the last bits; Mosaic has no log1p.
    lost = (1.0 - rest) - uniform
    return -_log(-(_log(rest) + lost))


def _log(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the logarithm of positive normal numbers, to about one unit in the last place.

    `jnp.log` spends a third of its instructions on zeros, subnormal numbers and infinities.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - _TWO_THIRDS) & _EXPONENT  # leaves a mantissa between 2/3 and 4/3
    t = lax.bitcast_convert_type(bits - exponent, jnp.float32) - 1.0
    series = jnp.float32(_SERIES[0])
    for coefficient in _SERIES[1:]:
        series = series * t + coefficient
    return exponent.astype(jnp.float32) * _LOG_2 + ((t * series) * t + t)
