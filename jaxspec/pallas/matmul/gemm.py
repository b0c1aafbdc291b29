"""Products of 16 to 256 rows: which of them are kernels, and how those are tiled.

There are four kernels. One is the product of `norm_matmul`. `split_matmul` puts out partial sums
where that gives every multiprocessor a block. `matmul_silu` gates its product, and
`matmul_squared_relu` squares it. The memory bounds the products of up to 64 rows. With more rows in
wide models tensor cores and shared memory bound them, so those have the largest blocks that still
run in one wave (`OneWave`).

The bounds below were measured on an H200, against XLA's products:
`benchmarks/results/kernels_h200.json`, ops norm_matmul, split_matmul, matmul_silu.
"""

from math import ceil
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.products import BLOCK_N, why_not_dtypes
from jaxspec.weight import Weight

MAX_PARTS = 2  # parts of the features of a wave: the sums of more parts cost what they save
_MAX_ROWS = 256
_MEMORY_BOUND_ROWS = 64
_MIN_HIDDEN = 1024  # below this width of a model XLA is as fast
_WIDE = 2048  # a model wider than this has its products of more rows in one wave
_BLOCK_ROWS = 128
_MAX_WARPGROUPS = 3  # that multiply: with four a thread has too few registers for its sums
_MIN_BUSY = 0.7, 0.8  # share of the multiprocessors, for one block of rows and for two


def split_rows(tokens: int) -> tuple[int, int]:
    """The rows of a block, a multiple of 8, and the number of blocks that share the tokens."""
    blocks = ceil(tokens / _BLOCK_ROWS)
    return 8 * ceil(tokens / blocks / 8), blocks


def num_parts(tokens: int, inner: int, outer: int) -> int:
    """The number of parts of the features that gives nearly every multiprocessor a block."""
    return device.parts(split_rows(tokens)[1] * ceil(outer / BLOCK_N), inner // 64)


class OneWave(NamedTuple):
    """The tiling of a product into large blocks that all run at once, one a multiprocessor."""

    rows: int  # of a block
    row_blocks: int
    warpgroups: int  # of a block, without the one that copies
    pieces: int  # of `BLOCK_N` columns of the weight, for each warpgroup
    parts: int  # of the features; with more than one, partial sums are put out

    @staticmethod
    def of(
        tokens: int, inner: int, outer: int, *, gate_up: bool = False, max_parts: int = 1
    ) -> "OneWave | None":
        """The tiling whose blocks copy least, or None if none keeps enough multiprocessors busy.

        There are 72 to 256 `tokens`, in steps of 8, and `outer` columns are put out. With `gate_up`
        each column is made of one of gate and one of up, so a warpgroup has a piece of each.

            256 rows, 4096 -> 12288, gate_up   3 warpgroups: 2 x 64 blocks of 128 x 192, 97 % busy
            256 rows, 12288 -> 4096            2, and 2 parts: 2 x 32 x 2 blocks of 128 x 128
        """
        rows, row_blocks = split_rows(tokens)
        cost, min_busy = {}, _MIN_BUSY[row_blocks - 1]
        for parts in range(1, max_parts + 1):
            for pieces in (2,) if gate_up else (1, 2):
                for warpgroups in range(_MAX_WARPGROUPS, 0, -1):
                    columns = BLOCK_N * warpgroups * (1 if gate_up else pieces)
                    blocks = row_blocks * ceil(outer / columns) * parts
                    is_wave = min_busy <= blocks / device.MULTIPROCESSORS <= 1
                    if is_wave and inner % (parts * 64) == 0:
                        copied = inner // parts * (rows + BLOCK_N * warpgroups * pieces)
                        sums = 4 * rows * columns if parts > 1 else 0  # written, and read again
                        cost[OneWave(rows, row_blocks, warpgroups, pieces, parts)] = copied + sums
        return min(cost, key=cost.__getitem__, default=None)


def choose(
    x: Float[Array, "rows inner"],
    weight: Weight,
    hidden: int,
    *,
    gate_up: bool = False,
    max_parts: int = 1,
) -> tuple[str | None, OneWave | None]:
    """Why no kernel takes this product in a model of width `hidden`, or None; and its tiling.

    The tiling is None where the product is not a single wave. `gate_up` and `max_parts` are those
    of `OneWave.of`.
    """
    (rows, inner), outer = x.shape, weight.outer // (2 if gate_up else 1)
    why = why_not_dtypes(x, weight)
    if why:
        pass
    elif hidden < _MIN_HIDDEN:
        why = f"{hidden} features"
    elif inner % 64 or outer % BLOCK_N:
        why = f"a weight of {inner} x {weight.outer}"
    # The last checks: rows alone change from program to program.
    elif rows % 8 or not 8 < rows <= _MAX_ROWS:
        why = f"not 16 to {_MAX_ROWS} rows, in steps of 8"
    elif rows > _MEMORY_BOUND_ROWS and hidden > _WIDE:
        wave = OneWave.of(rows, inner, outer, gate_up=gate_up, max_parts=max_parts)
        return None if wave else f"{rows} rows, which make no wave of blocks", wave
    elif rows > _MEMORY_BOUND_ROWS and gate_up:
        blocks = split_rows(rows)[1] * outer // BLOCK_N
        if blocks > device.MULTIPROCESSORS:  # some multiprocessors would have twice the work
            why = f"{blocks} blocks"
    return why, None
