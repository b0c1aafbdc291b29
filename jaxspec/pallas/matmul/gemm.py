"""Products of 16 to 256 rows: which of them are kernels, and how those are cut.

XLA's reach 2.1 to 3.2 TB/s of an H200's 4.2 at 64 rows. Ours are the product of `norm_matmul`,
`split_matmul`, which puts out partial sums where that gives every multiprocessor a block, and
`matmul_silu`, which gates what it multiplied. Of more rows of wide models tensor cores and shared
memory decide, so those have blocks as large as one wave of them allows (`Wave`).
"""

from math import ceil
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.products import COLUMNS, DTYPES

_MOST_ROWS = 256
_MEMORY_BOUND_ROWS = 64  # rows: the memory bounds their products, whatever their number
_WIDE = 2048  # features of a model: more rows of a wider one come in a wave
_ROWS = 128  # of a block
_MOST_WARPGROUPS = 3  # of a block, that multiply: more would not have registers for 128 sums
MOST_PARTS = 2  # of the features of a wave: sums of more cost what they save
_LEAST_BUSY = 0.7, 0.8  # of the multiprocessors, of up to 128 rows and of more: or XLA is as fast


def rows_of(tokens: int) -> tuple[int, int]:
    """Rows of a block, a multiple of 8, and how many blocks share the tokens."""
    blocks = ceil(tokens / _ROWS)
    return 8 * ceil(tokens / blocks / 8), blocks


def parts_of(tokens: int, inner: int, outer: int) -> int:
    """Into how many parts the features are cut: a block on nearly every multiprocessor."""
    return device.parts(rows_of(tokens)[1] * ceil(outer / COLUMNS), inner // 64)


class Wave(NamedTuple):
    """How a product is cut so that its blocks, as large as can be, all run at once."""

    rows: int  # of a block
    row_blocks: int
    warpgroups: int  # of a block, that multiply
    pieces: int  # of `COLUMNS` columns of the weight, of each warpgroup
    parts: int  # of the features: of more than one partial sums are put out

    @staticmethod
    def of(
        tokens: int, inner: int, outer: int, *, gates: bool = False, most_parts: int = 1
    ) -> "Wave | None":
        """The cut with which a block copies least, or None if none gives enough blocks one each.

        `tokens`: 72 to 256, in steps of 8; `outer`: columns that are put out; `gates`: of as many
        gates and others, a piece of each.

            256 rows, 4096 -> 12288, gates   3 warpgroups: 2 x 64 blocks of 128 x 192, 97 % busy
            256 rows, 12288 -> 4096          2, and 2 parts: 2 x 32 x 2 blocks of 128 x 128
        """
        rows, row_blocks = rows_of(tokens)
        cuts, least = {}, _LEAST_BUSY[row_blocks - 1]
        for parts in range(1, most_parts + 1):
            for pieces in (2,) if gates else (1, 2):
                for warpgroups in range(_MOST_WARPGROUPS, 0, -1):
                    columns = COLUMNS * warpgroups * (1 if gates else pieces)
                    blocks = row_blocks * ceil(outer / columns) * parts
                    is_wave = least <= blocks / device.MULTIPROCESSORS <= 1
                    if is_wave and inner % (parts * 64) == 0:
                        copied = inner // parts * (rows + COLUMNS * warpgroups * pieces)
                        sums = 4 * rows * columns if parts > 1 else 0  # written, and read again
                        cuts[Wave(rows, row_blocks, warpgroups, pieces, parts)] = copied + sums
        return min(cuts, key=cuts.__getitem__, default=None)


def choose(
    x: Float[Array, "rows inner"],
    weight: Float[Array, "inner outer"],
    hidden: int,
    *,
    gates: bool = False,
    most_parts: int = 1,
) -> tuple[str | None, Wave | None]:
    """Why no kernel takes this product of a model so wide, or None; and its cut, if it is a wave.

    Keywords: as of `Wave.of`.
    """
    (rows, inner), outer = x.shape, weight.shape[1] // (2 if gates else 1)
    why = None
    if x.dtype not in DTYPES or x.dtype != weight.dtype:
        why = f"{x.dtype} and {weight.dtype}"
    elif hidden < 1024:  # nobody waits for it
        why = f"{hidden} features"
    elif inner % 64 or outer % COLUMNS:
        why = f"a weight of {inner} x {weight.shape[1]}"
    # Last: what changes from program to program.
    elif rows % 8 or not 8 < rows <= _MOST_ROWS:
        why = f"not 16 to {_MOST_ROWS} rows, in steps of 8"
    elif rows > _MEMORY_BOUND_ROWS and hidden > _WIDE:
        wave = Wave.of(rows, inner, outer, gates=gates, most_parts=most_parts)
        return None if wave else f"{rows} rows, which make no wave of blocks", wave
    elif rows > _MEMORY_BOUND_ROWS and gates:
        blocks = rows_of(rows)[1] * outer // COLUMNS
        if blocks > device.MULTIPROCESSORS:  # some would have twice the work of others
            why = f"{blocks} blocks"
    return why, None
