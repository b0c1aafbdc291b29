"""How the attention kernels get keys and values: tiles of positions, copied page by page."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def float8_tile(*shape):
    """Shared memory for tiles of a pool of float8_e4m3fn, `shape[-1]` channels wide."""
    width = min(128, shape[-1])
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM(shape, jnp.float8_e4m3fn, transforms=transforms)


@dataclasses.dataclass(frozen=True)
class PageTiles:
    """Tiles of `keys` positions of one row, from a pool `[layers * 2 * pages * page_size, ...]`."""

    keys: int
    head_dim: int
    num_pages: int
    page_size: int
    num_slots: int
    table: int  # pages of a row in the table

    @property
    def context(self) -> int:
        """Positions of a row at most."""
        return self.table * self.page_size

    @property
    def piece(self) -> int:
        """Positions one copy brings: they lie in one page."""
        return math.gcd(self.keys, self.page_size)

    def barriers(self, stages: int):
        """One for each stage of a ring: its tile has arrived."""
        return plgpu.Barrier(num_arrivals=self.keys // self.piece, num_barriers=stages)

    def find(self, tables, slot, tile):
        """The pages of a tile, one a copy; beyond the table its last, beyond the pool its last."""
        places = [tile * self.keys + i for i in range(0, self.keys, self.piece)]
        entries = [jnp.minimum(lax.div(x, self.page_size), self.table - 1) for x in places]
        slot = jnp.clip(slot, 0, self.num_slots - 1)
        return tuple(jnp.clip(tables[slot, entry], 0, self.num_pages - 1) for entry in entries)

    def fetch(self, pool, layer, head, which, tile, pages, stage, arrived):
        """Start copying a tile of keys (`which` 0) or values (1) to `stage`."""
        for i, page in enumerate(pages):
            begin = ((layer * 2 + which) * self.num_pages + page) * self.page_size
            if self.page_size > self.piece:
                begin += lax.rem(tile * self.keys + i * self.piece, self.page_size)
            plgpu.copy_gmem_to_smem(
                pool.at[pl.ds(begin, self.piece), pl.ds(head * self.head_dim, self.head_dim)],
                stage.at[pl.ds(i * self.piece, self.piece)],
                arrived,
            )
