"""The part that the kernels of skinny products share (Pallas, Mosaic GPU); for kernels alone.

A block has 64 columns of the weight and some or all of its rows. It computes the transposed
product, `y.T = weight.T @ x.T`: wgmma takes 64 columns of the weight on one side, and as few as 8
rows of `x` on the other. A block starts the copies of all the weight that fits before it does
anything else, so what it does with its rows of `x` costs no time.
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
    """A block's part of the weight, and the ring in shared memory through which it comes."""

    weight: Any
    first_row: Any
    first_column: Any
    ring: Any
    filled: Any  # barriers: a place of the ring has its chunk


@dataclasses.dataclass(frozen=True)
class SkinnyTiling:
    """The product of one block: `inner` rows of the weight and `BLOCK_N` columns."""

    inner: int
    dtype: Any
    swizzled: int  # columns of a swizzled tile in shared memory; they divide the weight's columns
    stages: int  # chunks in the ring, of `chunk` rows of the weight each

    @staticmethod
    def of(weight: Any, inner: int, blocks: int, reserved: int) -> "SkinnyTiling":
        """The tiling with the largest ring that fits beside the rows and the `reserved` bytes."""
        room = device.room(blocks) - 2 * inner * MAX_ROWS - reserved
        ringless = SkinnyTiling(inner, weight.dtype, gcd(weight.shape[1], BLOCK_N), 0)
        chunk = ringless.chunk
        stages = min(inner // chunk, room // (2 * chunk * BLOCK_N))
        return dataclasses.replace(ringless, stages=stages)

    @property
    def chunk(self) -> int:
        """Rows of the weight that are copied at once."""
        return gcd(self.inner, 128)

    def scratch(self) -> dict[str, Any]:
        """Shared memory for the ring and for the operand's rows, as tensor cores read them."""
        tiling = plgpu.TilingTransform((8, self.swizzled))
        swizzled = tiling, plgpu.SwizzleTransform(2 * self.swizzled)
        ring = self.stages, self.chunk, BLOCK_N
        return {
            "ring": plgpu.SMEM(ring, self.dtype, transforms=swizzled),
            "tile": plgpu.SMEM((MAX_ROWS, self.inner), self.dtype, transforms=swizzled),
            "filled": plgpu.Barrier(num_barriers=self.stages),
        }

    def layout(self):
        """Register layout of the rows: one warp a row, and no bank conflicts in `tile`."""
        if self.swizzled == 64:
            return layouts.row_layout(self.inner, itemsize=2, most_lanes=32)
        # Eight lanes store at once; they have two rows of one tile, not one row of two tiles.
        tiling = plgpu.Tiling(((8, 128), (2, 32), (8,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-4, -3, -2), vector_dim=-1)

    def start(self, stream: WeightStream):
        """Start the copies of as many chunks as the ring holds."""
        for j in range(self.stages):
            self._fetch(stream, j)

    def _fetch(self, stream, j):
        """Start the copy of chunk `j`; columns beyond the weight's last arrive as zeros."""
        rows = pl.ds(stream.first_row + j * self.chunk, self.chunk)
        stage = j % self.stages
        part = stream.weight.at[rows, pl.ds(stream.first_column, BLOCK_N)]
        plgpu.copy_gmem_to_smem(part, stream.ring.at[stage], stream.filled.at[stage])

    def run(self, tile, stream: WeightStream):
        """The transposed product with `tile`: float32 `[BLOCK_N, MAX_ROWS]`."""
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
                    plgpu.commit_smem()  # no warp reads the chunk before this one any more
                    self._fetch(stream, refill)
            return sum_[...]

        return pl.run_scoped(
            all_chunks, plgpu.WGMMAAccumulatorRef((BLOCK_N, MAX_ROWS), jnp.float32)
        )


def put_out(product, tile, out):
    """Write a transposed product through `tile`, `[MAX_ROWS, BLOCK_N]`, to the rows of `out`.

    Columns beyond the last of `out` are dropped.
    """
    token = plgpu.broadcasted_iota(jnp.int32, product.shape, 1, layout=plgpu.Layout.WGMMA)
    for row in range(out.shape[0]):
        # Four lanes hold the 8 tokens of a column, two each. The mask leaves the one that is
        # wanted.
        of_row = jnp.sum(jnp.where(token == row, product, 0.0), axis=1)
        access.store(tile.at[row], of_row.astype(tile.dtype))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, out.shape[0])], out)
    plgpu.wait_smem_to_gmem(0)
