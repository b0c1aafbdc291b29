"""Parts shared by the kernels of matmuls of up to 8 rows (Pallas, Mosaic GPU); for kernels only.

A block has 64 columns of the weight and some or all of its rows. It computes the transposed matmul,
`y.T = weight.T @ x.T`: the M of wgmma is 64 columns of the weight, and its N as few as 8 rows of
`x`. A block starts the copies of all the weight that fits before anything else, so its work on the
rows of `x` costs no time.
"""

import dataclasses
from math import gcd
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.matmul.skinny_gemm import MAX_ROWS


class WeightStream(NamedTuple):
    """A block's part of the weight, and the ring in shared memory into which it is copied."""

    weight: Any
    first_row: Any
    first_column: Any
    ring: Any
    filled: Any  # a barrier per stage of the ring: its chunk is copied


@dataclasses.dataclass(frozen=True)
class SkinnyTiling:
    """Tiling of a block's matmul: `inner` rows of the weight and `BLOCK_N` columns."""

    inner: int
    dtype: Any
    swizzled: int  # columns per swizzled tile in shared memory; divides the weight's columns
    stages: int  # chunks in the ring, `chunk` rows of the weight each

    @staticmethod
    def of(weight: Any, inner: int, blocks: int, reserved: int) -> "SkinnyTiling":
        """Return the tiling with the largest ring that fits with the rows and `reserved` bytes."""
        room = device.room(blocks) - 2 * inner * MAX_ROWS - reserved
        ringless = SkinnyTiling(inner, weight.dtype, gcd(weight.shape[1], BLOCK_N), 0)
        chunk = ringless.chunk
        stages = min(inner // chunk, room // (2 * chunk * BLOCK_N))
        return dataclasses.replace(ringless, stages=stages)

    @property
    def chunk(self) -> int:
        """Rows of the weight per copy."""
        return gcd(self.inner, 128)

    def scratch(self) -> dict[str, Any]:
        tiling = plgpu.TilingTransform((8, self.swizzled))
        swizzled = tiling, plgpu.SwizzleTransform(2 * self.swizzled)
        ring = self.stages, self.chunk, BLOCK_N
        return {
            "ring": plgpu.SMEM(ring, self.dtype, transforms=swizzled),
            "tile": plgpu.SMEM((MAX_ROWS, self.inner), self.dtype, transforms=swizzled),
            "filled": plgpu.Barrier(num_barriers=self.stages),
        }

    def layout(self):
        """Return the register layout of the rows: one warp per row, no bank conflicts in `tile`."""
        if self.swizzled == 64:
            return layouts.row_layout(self.inner, itemsize=2, most_lanes=32)
        # Eight lanes store at once: two rows of one tile, not one row of two tiles.
        tiling = plgpu.Tiling(((8, 128), (2, 32), (8,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-4, -3, -2), vector_dim=-1)

    def start(self, stream: WeightStream):
        for j in range(self.stages):
            self._fetch(stream, j)

    def _fetch(self, stream, j):
        """Start the copy of chunk `j`; columns past the weight's last are filled with zeros."""
        rows = pl.ds(stream.first_row + j * self.chunk, self.chunk)
        stage = j % self.stages
        part = stream.weight.at[rows, pl.ds(stream.first_column, BLOCK_N)]
        plgpu.copy_gmem_to_smem(part, stream.ring.at[stage], stream.filled.at[stage])

    def run(self, tile, stream: WeightStream):
        """Return the transposed matmul with `tile`: float32 `[BLOCK_N, MAX_ROWS]`."""
        chunks = self.inner // self.chunk

        def all_chunks(sum_):
            for j in range(chunks):
                stage = j % self.stages
                plgpu.barrier_wait(stream.filled.at[stage])
                rows = tile.at[:, pl.ds(j * self.chunk, self.chunk)].transpose((1, 0))
                plgpu.wgmma(sum_, stream.ring.at[stage].transpose((1, 0)), rows)
                refill = j - 1 + self.stages
                if j > 0 and refill < chunks:
                    plgpu.wgmma_wait(1)
                    plgpu.commit_smem()  # also a barrier: no warp still reads the previous chunk
                    self._fetch(stream, refill)
            return sum_[...]

        return pl.run_scoped(
            all_chunks, plgpu.WGMMAAccumulatorRef((BLOCK_N, MAX_ROWS), jnp.float32)
        )


def put_out(product, tile, out):
    """Write a transposed matmul through `tile`, `[MAX_ROWS, BLOCK_N]`, to the rows of `out`.

    Columns past the last of `out` are dropped.
    """
    token = plgpu.broadcasted_iota(jnp.int32, product.shape, 1, layout=plgpu.Layout.WGMMA)
    for row in range(out.shape[0]):
        # Four lanes hold the 8 tokens of a column, two each. The mask selects one token.
        of_row = jnp.sum(jnp.where(token == row, product, 0.0), axis=1)
        access.store(tile.at[row], of_row.astype(tile.dtype))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, out.shape[0])], out)
    plgpu.wait_smem_to_gmem(0)
