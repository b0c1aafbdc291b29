"""Memory alignment of kernel operands."""

import math

import jax
from jax import lax

ALIGNMENT = 256  # bytes; Mosaic rejects an operand that does not start at a multiple
ALIGNED_COLUMNS = ALIGNMENT // 2  # 16-bit elements; a slice of a single row starts at a multiple


def aligned(x: jax.Array) -> jax.Array:
    """Return `x` as an aligned kernel operand: copied if it may be a misaligned slice of rows.

    The first axis of `x` is the rows. XLA passes adjacent rows of an array without a copy if the
    bytes of a row are a multiple of 128. If they are not a multiple of `ALIGNMENT`, such a slice
    may start at a misaligned address, so an optimization barrier makes XLA copy it.
    """
    row = math.prod(x.shape[1:]) * x.dtype.itemsize
    return lax.optimization_barrier(x) if row % ALIGNMENT else x
