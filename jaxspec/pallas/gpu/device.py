"""Sizes of the GPU that the kernels are tuned for, an H200 (an H100's are the same); alignment."""

import math

import jax
from jax import lax

THREADS = 128  # threads per warpgroup
MULTIPROCESSORS = 132
_SHARED_MEMORY = 227 * 1024  # maximum bytes per block
_RESERVED = 1024  # bytes per block that the GPU reserves; barriers get an equal amount


def room(blocks: int) -> int:
    """Return the bytes of shared memory available to each of `blocks` blocks.

    With more blocks than multiprocessors, each gets half: two then run on one multiprocessor, and
    no block waits for another to finish.
    """
    if blocks <= MULTIPROCESSORS:
        return _SHARED_MEMORY - _RESERVED
    return _SHARED_MEMORY // 2 - 2 * _RESERVED


def parts(blocks: int, units: int) -> int:
    """Return the largest number of equal parts of `units` whose blocks all run at once.

    Each part has `blocks` blocks.

        parts(16, 28) == 7: 7 x 16 blocks on 132 multiprocessors, with 4 units each
    """
    limit = max(1, MULTIPROCESSORS // blocks)
    return max(count for count in range(1, limit + 1) if units % count == 0)


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
