"""Register layouts that several kernels share."""

from collections.abc import Iterator
from math import gcd
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu.device import THREADS


def pieces_of(count: int) -> Iterator[tuple[int, int]]:
    """Split `count` rows into powers of two, largest first; yield (start, size) of each piece.

    list(pieces_of(6)) == [(0, 4), (4, 2)]
    """
    start = 0
    while start < count:
        size = 1 << ((count - start).bit_length() - 1)
        yield start, size
        start += size


def vectors(vector: int):
    """Return a register layout for one row of `THREADS * vector` elements.

    Each thread holds `vector` adjacent elements.
    """
    return plgpu.Layout.WG_STRIDED((THREADS * vector,), vec_size=vector)


class RowPiece(NamedTuple):
    """Slice of a row, and the register layout in which a block's threads hold it."""

    start: int
    size: int
    layout: Any

    @property
    def columns(self):
        return pl.ds(self.start, self.size)


def row_pieces(size: int, itemsize: int) -> list[RowPiece]:
    """Split a row of `size` elements, a multiple of `THREADS`, into one or two slices.

    A thread accesses the first slice in vectors of 16 bytes, or of 4 elements if 16 bytes do not
    divide it. The second slice is the remainder: less than 4 elements per thread.

        bfloat16: 4096 is one slice, 16 bytes at a time; 2688 is 2560, 8 bytes at a time, and 128
    """
    whole = size - size % (4 * THREADS)
    vector = 16 // itemsize if whole % (THREADS * 16 // itemsize) == 0 else 4
    pieces = [(0, whole, vector), (whole, size - whole, gcd((size - whole) // THREADS, 4))]
    return [
        RowPiece(start, length, plgpu.Layout.WG_STRIDED((length,), vec_size=vector))
        for start, length, vector in pieces
        if length
    ]


def row_layout(size: int, itemsize: int, most_lanes: int = 16):
    """Return a register layout for rows of `size` elements, each spread over lanes of one warp.

    A row takes up to `most_lanes` lanes, which hold vectors of 16 bytes (`16 // itemsize`
    elements). Sums over a row are shuffles within the warp.
    """
    vector = 16 // itemsize
    lanes = min(most_lanes, size // vector)
    rows = 32 // lanes  # per warp
    whole = (4 * rows, lanes * vector)
    if rows == 1:
        tiles, warps, lane_dims = (whole, (vector,)), (-3,), (-2,)
    else:
        tiles, warps, lane_dims = (whole, (rows, lanes * vector), (vector,)), (-5,), (-3, -2)
    tiling = plgpu.Tiling(tiles)
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=lane_dims, vector_dim=-1)


def lane_layout(size: int):
    """Return a register layout for one row of `size` elements, replicated in every warp.

    A lane holds one element at a time: neighbouring elements are in neighbouring lanes.
    """
    lanes = gcd(size, 32)
    copies = () if lanes == 32 else (plgpu.Replicated(32 // lanes),)
    # Mosaic requires a canonical form: no tile may equal the previous one.
    tiles, lane_dims = (((lanes,), (1,)), (-2, *copies)) if lanes > 1 else (((1,),), copies)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=lane_dims,
        vector_dim=-1,
    )


def piece_layout(rows: int, size: int, itemsize: int):
    """Return a register layout for `[rows, size]`, both powers of two, with each row in one warp.

    The elements are spread over all threads, up to 16 contiguous bytes per thread. With fewer
    elements than threads, several threads hold copies of the same ones.
    """
    vector = max(1, min(rows * size // THREADS, 16 // itemsize))
    lanes = min(size // vector, 32)
    of_warp = min(rows, 32 // lanes)
    warps = min(rows // of_warp, 4)
    width = lanes * vector
    # Mosaic requires a canonical form: no tile may be one row high or equal the previous one.
    if of_warp > 1:
        tiles, warp_dim, lane_dims = [(of_warp, width), (vector,)], -5, (-3, -2)
        tiles = [(warps * of_warp, width)] * (warps > 1) + tiles
    else:
        tiles, warp_dim, lane_dims = [(warps, width), (vector,)], -3, (-2,)
    warp_copies, lane_copies = 4 // warps, 32 // (of_warp * lanes)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles)),
        warp_dims=(warp_dim,) * (warps > 1) + (plgpu.Replicated(warp_copies),) * (warp_copies > 1),
        lane_dims=lane_dims + (plgpu.Replicated(lane_copies),) * (lane_copies > 1),
        vector_dim=-1,
    )
