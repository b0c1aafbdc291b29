"""Where in memory the operands of kernels may begin."""

import math

import jax
from jax import lax

ALIGNMENT = 256  # bytes: Mosaic refuses an operand that does not begin at a multiple
ALIGNED_COLUMNS = ALIGNMENT // 2  # in 16 bits: a part of a single row begins at a multiple


def aligned(x: jax.Array) -> jax.Array:
    """`x` as a kernel can take it: copied if it may be rows of an array that begin anywhere.

    The first axis of `x` is the rows. XLA hands on neighbouring rows of an array where they are, if
    the bytes of a row are a multiple of 128. Where they are no multiple of `ALIGNMENT`, such rows
    may begin badly, and XLA must make an array of them.
    """
    row = math.prod(x.shape[1:]) * x.dtype.itemsize
    return lax.optimization_barrier(x) if row % ALIGNMENT else x
