"""Tiling of the kernel for matmuls of e4m3 rows with weights in FP8 as published."""

from math import ceil
from typing import NamedTuple

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.float8_terms import CHUNK, ROWS
from jaxspec.pallas.matmul.products import BLOCK_N

_MAX_ROWS = 128  # rows per block; twice as many columns are the most that wgmma takes
MAX_PARTS = 4  # split-K parts
_MAX_CLUSTER = 2  # 1 rules out clusters
# Float32 sums per thread, by warpgroups that multiply: of a chunk, and of all chunks. With four
# warpgroups, threads have too few registers.
_MAX_SUMS = {1: 192, 2: 192, 3: 112}
# Rates of a multiprocessor per clock, of this kernel and that of many rows
MEMORY = 19  # bytes from memory, its share of 4.25 TB/s
COPIED = 32  # bytes from the L2 cache
_START = 2500  # clocks until the first matmul of a tile, and to write its sums
# Clocks of a chunk in which no tensor core runs: to wait, and to scale and add a row's sums. The
# warpgroups share the tensor cores and so finish together; with turns (one warpgroup at a time)
# they took as long on an H200, and three of them longer.
_CHUNK_START, _ADDED = 320, 1.75


class Float8GemmTiling(NamedTuple):
    """Distribution of a matmul over blocks."""

    rows: int  # rows per block, a multiple of 8 for each block of a cluster
    row_blocks: int
    warpgroups: int  # warpgroups of a block that multiply `BLOCK_N` columns each
    parts: int  # split-K parts; more than one returns partial sums
    cluster: int  # blocks with neighbouring columns that share the copies of their rows: 1 or 2

    @staticmethod
    def of(
        tokens: int, inner: int, outer: int, terms: int, *, is_split: bool = False
    ) -> "Float8GemmTiling":
        """Return the tiling that should take the least time; `is_split` allows several parts.

        64 rows of two terms, 4096 -> 24576: 128 blocks of 64 x 192
        64 rows, 12288 -> 4096, split: 32 x 4 blocks of 64 x 128
        2048 rows: blocks of 128 x 128, one after the other on each multiprocessor
        """
        limit = min(MAX_PARTS, inner // CHUNK) if is_split else 1
        least = ceil(tokens / _MAX_ROWS)
        times = {}
        for row_blocks in (least, least + 1, 2 * least):
            for warpgroups, most in _MAX_SUMS.items():
                columns, rest = divmod(outer, warpgroups * BLOCK_N)
                is_shared = columns % _MAX_CLUSTER == 0 and tokens > ROWS
                cluster = _MAX_CLUSTER if is_shared else 1
                rows = ROWS * cluster * ceil(tokens / row_blocks / ROWS / cluster)
                if rest or (terms + 1) * rows // 2 > most:
                    continue
                for parts in range(1, limit + 1):
                    tiling = Float8GemmTiling(rows, row_blocks, warpgroups, parts, cluster)
                    times[tiling] = tiling.clocks(inner, outer, terms)
        return min(times, key=lambda tiling: (times[tiling], -tiling.warpgroups))

    @property
    def width(self) -> int:
        """Columns per block."""
        return self.warpgroups * BLOCK_N

    def blocks(self, outer: int) -> int:
        return self.parts * self.row_blocks * outer // self.width

    def clocks(self, inner: int, outer: int, terms: int) -> float:
        """Return an estimate of the clocks that the matmul takes."""
        tensor_cores = 2 * terms * self.rows  # of a warpgroup's chunk
        copied = CHUNK * (self.width + terms * self.rows / self.cluster)
        computed = self.warpgroups * (tensor_cores + _ADDED * self.rows) + _CHUNK_START
        chunk = max(computed, copied / COPIED)
        waves = ceil(self.blocks(outer) / device.MULTIPROCESSORS)
        computing = waves * (_START + ceil(inner / CHUNK / self.parts) * chunk)
        reading = inner * outer / (device.MULTIPROCESSORS * MEMORY) + _START
        sums = 8 * self.parts * self.rows * self.row_blocks * outer if self.parts > 1 else 0
        return max(computing, reading) + sums / (device.MULTIPROCESSORS * MEMORY)
