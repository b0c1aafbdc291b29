"""Choice and tiling of kernels for matmuls of 16 to 256 rows.

There are four kernels: the matmul of `norm_matmul`; `split_matmul`, which returns partial sums
where that gives every multiprocessor a block; `matmul_silu`, which applies the gate; and
`matmul_squared_relu`, which applies the squared ReLU. Matmuls of up to 64 rows are memory-bound.
With more rows in wide models they are bound by tensor cores and shared memory, so those use the
largest blocks that still run in one wave (`OneWave`).

The bounds below were measured on an H200 against XLA's matmuls:
`benchmarks/results/kernels_h200.json`, ops norm_matmul, split_matmul, matmul_silu.
"""

from math import ceil
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.products import BLOCK_N, why_not_dtypes
from jaxspec.weight import Weight

MAX_PARTS = 2  # split-K parts of a wave; summing more costs what they save
_MAX_ROWS = 256
_MEMORY_BOUND_ROWS = 64
_MIN_HIDDEN = 1024  # width of a model below which XLA is as fast
_WIDE = 2048  # wider models run matmuls of over 64 rows in one wave
_BLOCK_ROWS = 128
_MAX_WARPGROUPS = 3  # multiplying warpgroups; with four, threads have too few registers for sums
_MIN_BUSY = 0.7, 0.8  # share of busy multiprocessors, for one block of rows and for two


def split_rows(tokens: int) -> tuple[int, int]:
    """Return the rows per block, a multiple of 8, and the number of blocks over the tokens."""
    blocks = ceil(tokens / _BLOCK_ROWS)
    return 8 * ceil(tokens / blocks / 8), blocks


def num_parts(tokens: int, inner: int, outer: int) -> int:
    """Return the number of split-K parts that gives nearly every multiprocessor a block."""
    return device.parts(split_rows(tokens)[1] * ceil(outer / BLOCK_N), inner // 64)


class OneWave(NamedTuple):
    """Tiling of a matmul into large blocks that all run at once, one per multiprocessor."""

    rows: int  # rows per block
    row_blocks: int
    warpgroups: int  # warpgroups of a block that multiply; another one copies
    pieces: int  # pieces of `BLOCK_N` weight columns per warpgroup
    parts: int  # split-K parts; more than one returns partial sums

    @staticmethod
    def of(
        tokens: int, inner: int, outer: int, *, gate_up: bool = False, max_parts: int = 1
    ) -> "OneWave | None":
        """Return the tiling whose blocks copy least, or None if too few multiprocessors are busy.

        `tokens` are 72 to 256, in steps of 8, and `outer` is the number of output columns. With
        `gate_up`, each output column takes a column of gate and one of up, so a warpgroup has a
        piece of each.

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
                        sums = 4 * rows * columns if parts > 1 else 0  # written and read again
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
    """Return why no kernel takes this matmul in a model of width `hidden`, or None; and its tiling.

    The tiling is None unless the matmul runs in one wave. `gate_up` and `max_parts` are those of
    `OneWave.of`.
    """
    (rows, inner), outer = x.shape, weight.outer // (2 if gate_up else 1)
    why = why_not_dtypes(x, weight)
    if why:
        pass
    elif hidden < _MIN_HIDDEN:
        why = f"{hidden} features"
    elif inner % 64 or outer % BLOCK_N:
        why = f"a weight of {inner} x {weight.outer}"
    # Checked last: only the number of rows differs between programs.
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
