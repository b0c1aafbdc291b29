"""What the products of few rows share on a Hopper GPU (Pallas, Mosaic GPU).

Import only where kernels run. A block has 64 columns of the weight and some or all of its rows. It
computes the product transposed, so that the many columns are on the side of tensor cores that takes
64 and the few rows on the one that takes 8: `y.T = weight.T @ x.T`. All the weight that fits is
under way before anything else is done: what a block does for its rows costs no time beside that.
"""

import dataclasses
from math import gcd
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.matmul.few_rows import MOST_ROWS
from jaxspec.pallas.matmul.products import COLUMNS


@dataclasses.dataclass(frozen=True)
class Product:
    """One block's: `inner` rows of the weight, and `COLUMNS` of its columns or several times that.

    `source`, as its methods take it: the weight, the first row and column, and the `ring` and
    `arrived` of `scratch`.
    """

    inner: int
    dtype: Any
    pieces: int  # of `COLUMNS` columns
    tiled: int  # columns of a tile in shared memory, which divide the weight's
    stages: int  # of the ring, of `chunk` rows of the weight each

    @staticmethod
    def of(weight: Any, inner: int, blocks: int, beside: int, pieces: int = 1) -> "Product":
        """As large a ring as fits beside the rows and `beside` bytes of what else is kept there."""
        room = device.room(blocks) - 2 * inner * MOST_ROWS - beside
        ringless = Product(inner, weight.dtype, pieces, gcd(weight.shape[1], COLUMNS), 0)
        chunk = ringless.chunk
        stages = min(inner // chunk, room // (2 * pieces * chunk * COLUMNS))
        return dataclasses.replace(ringless, stages=stages)

    @property
    def chunk(self) -> int:
        """Rows of the weight that are copied at once."""
        return gcd(self.inner, 128 // self.pieces)

    def scratch(self) -> dict[str, Any]:
        """Shared memory for the ring and, normed, for the rows; both as tensor cores want it."""
        tiles = plgpu.TilingTransform((8, self.tiled)), plgpu.SwizzleTransform(2 * self.tiled)
        ring = self.stages, self.pieces, self.chunk, COLUMNS
        return {
            "ring": plgpu.SMEM(ring, self.dtype, transforms=tiles),
            "tile": plgpu.SMEM((MOST_ROWS, self.inner), self.dtype, transforms=tiles),
            "arrived": plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.stages),
        }

    def layout(self):
        """Register layout of the rows: each in one warp, and stored to `tile` without conflicts."""
        if self.tiled == 64:
            return layouts.row_layout(self.inner, itemsize=2, most_lanes=32)
        # Eight lanes, which store at once, have two rows of a tile and not one of two tiles.
        tiling = plgpu.Tiling(((8, 128), (2, 32), (8,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-4, -3, -2), vector_dim=-1)

    def start(self, *source):
        """Start the copies of as many chunks as the ring holds."""
        for j in range(self.stages):
            self._fetch(j, *source)

    def _fetch(self, j, weight, first_row, column, ring, arrived):
        """Start the copy of chunk `j`; what is beyond the weight's last column arrives as zeros."""
        rows = pl.ds(first_row + j * self.chunk, self.chunk)
        stage = j % self.stages
        for piece in range(self.pieces):
            part = weight.at[rows, pl.ds(column + piece * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(part, ring.at[stage, piece], arrived.at[stage])

    def run(self, tile, *source):
        """Each piece's product, transposed: `[COLUMNS, MOST_ROWS]` float32. `tile` has the rows."""
        *_, ring, arrived = source
        chunks = self.inner // self.chunk

        def run(*sums):
            for j in range(chunks):
                stage = j % self.stages
                plgpu.barrier_wait(arrived.at[stage])
                rows = tile.at[:, pl.ds(j * self.chunk, self.chunk)].transpose((1, 0))
                for piece, sum_ in enumerate(sums):
                    plgpu.wgmma(sum_, ring.at[stage, piece].transpose((1, 0)), rows)
                again = j - 1 + self.stages
                if j > 0 and again < chunks:
                    plgpu.wgmma_wait(self.pieces)
                    plgpu.commit_smem()  # no warp reads the chunk before any more
                    self._fetch(again, *source)
            return [sum_[...] for sum_ in sums]

        shape = COLUMNS, MOST_ROWS
        return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * self.pieces)


def put_out(product, tile, out):
    """Write a transposed product through `tile`, `[MOST_ROWS, COLUMNS]`, to the rows of `out`.

    What lies beyond the last column of `out` is dropped.
    """
    token = plgpu.broadcasted_iota(jnp.int32, product.shape, 1, layout=plgpu.Layout.WGMMA)
    for row in range(out.shape[0]):
        # Of four lanes that share a row each has another two tokens, and one of the eight is it.
        of_row = jnp.sum(jnp.where(token == row, product, 0.0), axis=1)
        access.store(tile.at[row], of_row.astype(tile.dtype))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, out.shape[0])], out)
    plgpu.wait_smem_to_gmem(0)
