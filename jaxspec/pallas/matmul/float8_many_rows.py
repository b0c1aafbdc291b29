"""Tiling of the kernel for matmuls of 128 and more e4m3 rows with weights in FP8 as published."""

from math import ceil
from typing import NamedTuple

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.float8_gemm import COPIED, MAX_PARTS, MEMORY
from jaxspec.pallas.matmul.float8_terms import CHUNK

ROWS, COLUMNS = 128, 128  # of a block
# Fewer rows of activations are bound by memory, and waste less in blocks of fewer rows.
LEAST_ROWS = 128
# Blocks of a cluster in rows, which share the copies of the weight, and in columns, which share
# those of the activations' rows. (1, 1) rules out clusters.
_CLUSTER = (1, 2)
_START = 2000  # clocks until the first matmul of a tile, and to write its sums
_CHUNK_START = 64  # clocks of a chunk in which no tensor core runs


class Float8ManyRowsTiling(NamedTuple):
    """Distribution of a matmul over blocks of `ROWS` x `COLUMNS`."""

    row_blocks: int  # a multiple of the cluster's
    parts: int  # split-K parts; more than one returns partial sums
    cluster: tuple[int, int] = (1, 1)  # blocks that share copies, in rows and in columns

    @staticmethod
    def of(
        tokens: int, inner: int, outer: int, terms: int, *, is_split: bool = False
    ) -> "Float8ManyRowsTiling | None":
        """Return the tiling that should take the least time; `is_split` allows several parts.

        Return None if the kernel cannot compute the matmul, or if the rows are too few.

        256 rows, 4096 -> 24576: 2 x 192 blocks, in clusters of two
        256 rows, 12288 -> 4096, split: 2 parts of 2 x 32 blocks
        """
        units, rest = divmod(inner // CHUNK * terms, 2)  # pairs of products
        if tokens < LEAST_ROWS or outer % COLUMNS or rest:
            return None
        in_rows, in_columns = _CLUSTER
        row_blocks = ceil(tokens / ROWS / in_rows) * in_rows
        in_columns = in_columns if outer // COLUMNS % in_columns == 0 else 1
        tilings = [
            Float8ManyRowsTiling(row_blocks, parts, (in_rows, in_columns))
            for parts in range(1, 1 + (MAX_PARTS if is_split else 1))
            if units % parts == 0
        ]
        return min(tilings, key=lambda tiling: tiling.clocks(inner, outer, terms))

    def blocks(self, outer: int) -> int:
        return self.parts * self.row_blocks * outer // COLUMNS

    def clocks(self, inner: int, outer: int, terms: int) -> float:
        """Return an estimate of the clocks that the matmul takes."""
        in_rows, in_columns = self.cluster
        computed = 2 * terms * ROWS * COLUMNS // 64 + _CHUNK_START
        copied = CHUNK * (COLUMNS / in_rows + terms * ROWS / in_columns)
        chunk = max(computed, copied / COPIED)
        waves = ceil(self.blocks(outer) / device.MULTIPROCESSORS)
        computing = waves * (_START + ceil(inner / CHUNK / self.parts) * chunk)
        reading = inner * outer / (device.MULTIPROCESSORS * MEMORY) + _START
        sums = 8 * self.parts * self.row_blocks * ROWS * outer if self.parts > 1 else 0
        return max(computing, reading) + sums / (device.MULTIPROCESSORS * MEMORY)
