"""Activations as e4m3 numbers, their terms: the exact sum of two, or one that is rounded.

Functions that kernels call, too, have only operations that Mosaic supports.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.weight import (
    PUBLISHED_BLOCK,
    Float8BlockExperts,
    Float8Blocks,
    Published8Bit,
    Published8BitExperts,
)

CHUNK = PUBLISHED_BLOCK  # features of a sum of FP8 products, and of a scale
LOW = 1 / 16  # factor of the low parts
ROWS = 8  # rows that a kernel splits at a time
_TOP = 7  # the largest number of a chunk is scaled to 2**7 to 2**8
_LARGEST = 448  # of e4m3
_SMALLEST = 2.0**-126  # of float32; below are subnormal numbers, which devices may take for zeros
_SMALLEST_NORMAL, _STEP = 2.0**-6, 2.0**-9  # of e4m3; smaller numbers are multiples of the step
_MANTISSA_BITS = 3  # of e4m3
_BIAS, _MANTISSA = 127, 23  # of float32


def split(
    x: Float[Array, "rows features"],
) -> tuple[Float[Array, "rows features"], Float[Array, "rows features"], Float[Array, " rows"]]:
    """Return float8_e4m3fn arrays `high`, `low`, and the float32 power of two of each row.

    `factor * (high + low / 16)` equals a 16-bit `x`, given in float32, for entries down to 2**-13
    of the row's largest, and differs by at most 2**-21 of that largest below. A row with a number
    that is not finite has a NaN in its place. Kernels call this, too.
    """
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1), jnp.int32)
    exponent = bits >> _MANTISSA
    # Below 2**-119 both powers of two stay normal numbers.
    held = jnp.where(exponent < _TOP + 1, _TOP + 1, exponent)
    factor = lax.bitcast_convert_type((held - _TOP) << _MANTISSA, jnp.float32)
    # Infinity times 0 is NaN; a conversion to e4m3 could saturate instead.
    inverse = jnp.where(exponent > 2 * _BIAS, 0, (2 * _BIAS + _TOP - held) << _MANTISSA)
    inverse = lax.bitcast_convert_type(inverse, jnp.float32)
    scaled = x * lax.broadcast_in_dim(inverse, x.shape, (0,))
    high = scaled.astype(jnp.float8_e4m3fn)
    low = (scaled - high.astype(jnp.float32)) * (1 / LOW)
    return high, low.astype(jnp.float8_e4m3fn), factor


def rounded(
    x: Float[Array, "rows features"],
) -> tuple[Float[Array, "rows features"], Float[Array, " rows"]]:
    """Return `x`, given in float32, in float8_e4m3fn, and the float32 factor of each row.

    The factor scales the row's largest number to 448. A row with a number that is not finite has a
    NaN in its place. Kernels call this, too.
    """
    scaled, factor = _scaled(x)
    return scaled.astype(jnp.float8_e4m3fn), factor


def _scaled(x):
    factor = jnp.max(jnp.abs(x), axis=1) * (1 / _LARGEST)
    factor = jnp.where(factor < _SMALLEST, _SMALLEST, factor)
    inverse = 1 / factor  # 0 for infinity, and infinity times 0 is NaN
    return x * lax.broadcast_in_dim(inverse, x.shape, (0,)), factor


class Terms(NamedTuple):
    """Rows of a matmul in float8_e4m3fn, with a factor for each row and chunk of features.

    Mosaic copies tiles of 8 rows, so rows are padded to a multiple of `ROWS`, with any numbers.
    """

    numbers: tuple[Float[Array, "padded inner"], ...]  # high and low halves, or rounded numbers
    factors: Float[Array, "chunks padded"]  # float32


def of_whole_rows(x: Float[Array, "rows inner"]) -> Terms:
    """Round `x` with a factor for each whole row, by XLA."""
    padded = jnp.pad(x.astype(jnp.float32), ((0, padded_rows(x.shape[0]) - x.shape[0]), (0, 0)))
    number, factor = rounded(padded)
    return Terms((number,), jnp.broadcast_to(factor, (x.shape[1] // CHUNK, len(factor))))


def padded_rows(tokens: int) -> int:
    """Return the rows of the `Terms` of `tokens` rows."""
    return -(-tokens // ROWS) * ROWS


def as_multiplied(
    x: Float[Array, "rows inner"], weight: Published8Bit | Published8BitExperts
) -> Float[Array, "rows inner"]:
    """Return float32 activations as a matmul with `weight` sees them: rounded for one term."""
    x = x.astype(jnp.float32)
    if weight.terms == 2:
        return x
    tokens, inner = x.shape
    size = CHUNK if isinstance(weight, Float8Blocks | Float8BlockExperts) else inner
    groups = -(-inner // size)
    padded = jnp.pad(x, ((0, 0), (0, groups * size - inner)))
    scaled, factor = _scaled(padded.reshape(tokens * groups, size))
    wide = _to_e4m3(scaled) * factor[:, None]
    return wide.reshape(tokens, groups * size)[:, :inner]


def _to_e4m3(x):
    """Round float32 numbers to those of e4m3.

    XLA for GPUs would remove a conversion to 8 bits and back.
    """
    subnormal = jnp.round(x / _STEP) * _STEP
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=_MANTISSA_BITS)
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, subnormal, normal)
