"""Choice of kernels for matmuls with weights in FP8 as published, and tiling of that for few rows.

A bfloat16 number has 8 significant bits and an e4m3 number 4, so an activation is the exact sum of
two e4m3 numbers, `factor * (high + low / 16)`. The kernels multiply both by the weight's bytes as
they are. Tensor cores sum FP8 products with about 14 bits, so the sum over each 128 features is
scaled and added in float32. If the weight has one term, an activation is one rounded number.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.float8_terms import CHUNK
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import Float8Blocks, Float8Rows, Published8Bit

FUSED_ROWS = 8  # rows up to which the kernel runs what precedes a matmul in every block
_SCALES = 4  # it copies the scales of a block's columns, a multiple of 16 bytes
_MAX_PARTS = 4  # split-K parts; each adds 4 bytes per output to write and to read
_WIDEST = 3  # warpgroups that multiply in the largest block of the kernel for more rows
_FULL = 0.75  # share of the multiprocessors that makes full use of the memory


class Float8Tiling(NamedTuple):
    """Distribution of a matmul of few rows over blocks of `BLOCK_N` columns."""

    rows: int  # a multiple of 8
    parts: int  # split-K parts

    @staticmethod
    def of(tokens: int, inner: int, outer: int, *, is_split: bool = False) -> "Float8Tiling":
        """Return the tiling for `tokens` rows; `is_split` allows several parts.

        There are as many parts as run at once, two blocks per multiprocessor. With few rows a block
        mostly waits, and two hide each other's waits.

        8 rows, 12288 -> 4096, split: 64 x 4 blocks
        8 rows, 6144 -> 5120, split: 80 x 3 blocks
        """
        limit = min(_MAX_PARTS, inner // CHUNK) if is_split else 1
        parts = min(limit, 2 * device.MULTIPROCESSORS // (outer // BLOCK_N))
        return Float8Tiling(-(-tokens // 8) * 8, max(1, parts))

    def blocks(self, outer: int) -> int:
        return self.parts * outer // BLOCK_N


def why_not_kernel(x: jax.Array | jax.ShapeDtypeStruct, weight: Published8Bit) -> str | None:
    """Return why no kernel can multiply rows in the dtype of `x` by `weight`, or None."""
    if x.dtype != jnp.bfloat16:  # 11 significant bits are not two e4m3 numbers
        return f"{x.dtype} for 8 bits"
    if weight.inner % CHUNK or weight.outer % BLOCK_N:
        return f"a weight of {weight.inner} x {weight.outer}"
    return None


def why_not_split_by_kernel(weight: Published8Bit) -> str | None:
    """Return why no kernel makes e4m3 numbers of the activations for `weight`, or None.

    Kernels see 128 features at a time.
    """
    is_by_row = isinstance(weight, Float8Rows) and weight.terms == 1
    return "a scale for each row of activations" if is_by_row else None


def is_fused(rows: int, weight: Published8Bit) -> bool:
    """Return whether the kernel of this module multiplies `rows` rows, or that of `float8_gemm`.

    The other one is faster where its largest blocks are about as many as the multiprocessors, as
    those of Qwen3.5-9B's gate and up matrices: 128.
    """
    if isinstance(weight, Float8Blocks) and weight.inner % (CHUNK * _SCALES):
        return False
    blocks, rest = divmod(weight.outer, _WIDEST * BLOCK_N)
    if not rest and _FULL * device.MULTIPROCESSORS < blocks <= device.MULTIPROCESSORS:
        return False
    return rows <= FUSED_ROWS and why_not_split_by_kernel(weight) is None
