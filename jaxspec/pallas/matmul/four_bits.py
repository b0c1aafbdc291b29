"""Choice and tiling of the kernel for matmuls with published weights in 4 bits.

All of it is exact up to float32 sums: bfloat16 has 8 significant bits, an integer less its zero
point 4, and an FP4 number times its scale 6. So the kernel makes bfloat16 numbers of the weight in
registers, and multiplies the activations as they are.
"""

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import FLOAT4_GROUP, INT4_GROUPS, PACKED_UNIT, Float4Groups, Published4Bit

FEATURES = 256  # of a stage: rows of 128 bytes of the weight
_TURN_ROWS = 8  # per block of integers; two blocks with two warpgroups for its columns still fit
_MAX_ROWS = 128  # per block; of integers no more than the features with one scale
_MAX_SPLIT_ROWS = 64  # per block of several parts; float32 sums take much shared memory
_MAX_NARROW_ROWS = 64  # per block of one warpgroup that multiplies, all of whose sums it holds
FEW_ROWS = 16  # per block; two blocks of one warpgroup that multiplies fit on a multiprocessor
_MAX_PARTS = 4  # split-K parts; each adds 4 bytes per output to write and to read


class FourBitsTiling(NamedTuple):
    """Distribution of a matmul over blocks."""

    rows: int  # rows per block, a multiple of 8
    row_blocks: int
    warpgroups: int  # warpgroups of a block that multiply `BLOCK_N` columns each
    parts: int  # split-K parts; more than one returns partial sums
    turns: int = 1  # such warpgroups with the same columns, which take turns in the features

    @staticmethod
    def of(tokens: int, weight: Published4Bit, *, is_split: bool = False) -> "FourBitsTiling":
        """Return the tiling for `tokens` rows; `is_split` allows several parts.

        There are as many parts as run at once. With few rows that is two blocks per multiprocessor;
        a block mostly waits, and two hide each other's waits. Up to 8 rows of integers are read
        faster than a warpgroup makes bfloat16 numbers of them, so two take turns. With more rows
        two warpgroups share the copies of their rows.

        8 rows, 12288 -> 4096, split: 64 x 4 blocks
        128 rows, 4096 -> 24576: 192 blocks of 128 x 128
        """
        has_float4 = isinstance(weight, Float4Groups)
        most = _MAX_ROWS if has_float4 else min(_MAX_ROWS, weight.group)
        tiling = FourBitsTiling._whole(tokens, weight.outer, most)
        if tiling.rows <= _TURN_ROWS and not has_float4:
            tiling = tiling._replace(turns=2)
        if not is_split:
            return tiling
        if tiling.blocks(weight.outer) <= device.MULTIPROCESSORS // 2 and tiling.rows > FEW_ROWS:
            tiling = FourBitsTiling._whole(tokens, weight.outer, min(most, _MAX_SPLIT_ROWS))
        at_once = device.MULTIPROCESSORS * (2 if tiling.rows <= FEW_ROWS else 1)
        limit = min(_MAX_PARTS, ceil(weight.inner / FEATURES))
        return tiling._replace(parts=max(1, min(limit, at_once // tiling.blocks(weight.outer))))

    @staticmethod
    def _whole(tokens: int, outer: int, most: int) -> "FourBitsTiling":
        """Return a tiling of one part, with up to `most` rows per block."""
        may_be_wide = outer % (2 * BLOCK_N) == 0
        row_blocks = ceil(tokens / (most if may_be_wide else min(most, _MAX_NARROW_ROWS)))
        rows = 8 * ceil(tokens / row_blocks / 8)
        is_wide = may_be_wide and rows > FEW_ROWS
        return FourBitsTiling(rows, row_blocks, 2 if is_wide else 1, 1)

    @property
    def width(self) -> int:
        """Columns per block."""
        return self.warpgroups * BLOCK_N

    def blocks(self, outer: int) -> int:
        return self.parts * self.row_blocks * outer // self.width


def why_not_kernel(x: jax.Array | jax.ShapeDtypeStruct, weight: Published4Bit) -> str | None:
    """Return why the kernel cannot multiply rows in the dtype of `x` by `weight`, or None."""
    if x.dtype != jnp.bfloat16:
        return f"{x.dtype} for 4 bits"
    if weight.inner % PACKED_UNIT or weight.outer % BLOCK_N:
        return f"a weight of {weight.inner} x {weight.outer}"
    groups = (FLOAT4_GROUP,) if isinstance(weight, Float4Groups) else INT4_GROUPS
    if weight.group not in groups:
        return f"groups of {weight.group}"
    return None
