"""Choice and tiling of the kernel for matmuls with weights in FP8 as published.

A bfloat16 number has 8 significant bits and an e4m3 number 4, so an activation is the exact sum of
two e4m3 numbers, `factor * (high + low / 16)`. The kernel multiplies both by the weight's bytes as
they are. Tensor cores sum FP8 products with about 14 bits, so the sum over each 128 features is
scaled and added in float32.
"""

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.float8_terms import CHUNK
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import Float8Blocks, Float8Rows

FUSED_ROWS = 8  # rows up to which the kernel runs what precedes a matmul in every block
_SCALES = 4  # a copy of scales is a multiple of 16 bytes
_BLOCK_ROWS = 64
_MAX_PARTS = 4  # split-K parts; each adds 4 bytes per output to write and to read
_MANY_PARTS = 8  # rows up to which there are as many parts as run at once
_SHARED_ROWS = 16  # rows up to which two blocks share a multiprocessor


class Float8Tiling(NamedTuple):
    """Distribution of a matmul over blocks."""

    rows: int  # rows per block, a multiple of 8
    row_blocks: int
    warpgroups: int  # warpgroups of a block that multiply `BLOCK_N` columns each
    parts: int  # split-K parts

    @staticmethod
    def of(tokens: int, inner: int, outer: int, *, is_split: bool = False) -> "Float8Tiling":
        """Return the tiling for `tokens` rows; `is_split` allows several parts.

        8 rows, 12288 -> 4096, split: 64 x 4 blocks, two on most multiprocessors
        8 rows, 6144 -> 5120, split: 80 x 3 blocks
        128 rows, 4096 -> 24576: 2 x 192 blocks of 64 x 128
        """
        row_blocks = ceil(tokens / _BLOCK_ROWS)
        rows = 8 * ceil(tokens / row_blocks / 8)
        warpgroups = 1 if rows <= _SHARED_ROWS or outer % (2 * BLOCK_N) else 2
        blocks = row_blocks * outer // (warpgroups * BLOCK_N)
        limit = min(_MAX_PARTS, inner // CHUNK) if is_split else 1
        parts = _most_at_once(blocks, limit) if rows <= _MANY_PARTS else _busiest(blocks, limit)
        return Float8Tiling(rows, row_blocks, warpgroups, parts)

    def blocks(self, outer: int) -> int:
        return self.parts * self.row_blocks * outer // (self.warpgroups * BLOCK_N)

    @property
    def shares(self) -> bool:
        """True if the registers of two blocks fit on a multiprocessor."""
        return self.warpgroups == 1 and self.rows <= _SHARED_ROWS


def _most_at_once(blocks: int, limit: int) -> int:
    """Return the most parts, up to `limit`, whose blocks all run at once, two per multiprocessor.

    With few rows a block mostly waits, and two hide each other's waits.
    """
    return max(1, min(limit, 2 * device.MULTIPROCESSORS // blocks))


def _busiest(blocks: int, limit: int) -> int:
    """Return the fewest parts, up to `limit`, that keep nearly the most multiprocessors busy."""
    busy = {parts: _busy(blocks * parts) for parts in range(1, limit + 1)}
    enough = 0.95 * max(busy.values())
    return min(parts for parts in busy if busy[parts] >= enough)


def _busy(blocks: int) -> float:
    """Return the share of multiprocessors with as many blocks as any has."""
    return blocks / (device.MULTIPROCESSORS * ceil(blocks / device.MULTIPROCESSORS))


def why_not_kernel(
    x: jax.Array | jax.ShapeDtypeStruct, weight: Float8Blocks | Float8Rows
) -> str | None:
    """Return why the kernel cannot multiply rows in the dtype of `x` by `weight`, or None."""
    if weight.terms == 1:
        return "rounded activations"
    if x.dtype != jnp.bfloat16:  # 11 significant bits are not two e4m3 numbers
        return f"{x.dtype} for 8 bits"
    unit = CHUNK * (_SCALES if isinstance(weight, Float8Blocks) else 1)
    if weight.inner % unit or weight.outer % BLOCK_N:
        return f"a weight of {weight.inner} x {weight.outer}"
    return None
