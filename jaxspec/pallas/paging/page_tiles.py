"""Tiles of keys and values, which the attention kernels copy page by page to shared memory."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

KEYS, VALUES = 0, 1  # along the second axis of the pool


def float8_tile(*shape):
    """Return shared memory for tiles of a float8_e4m3fn pool, `shape[-1]` channels wide."""
    width = min(128, shape[-1])
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM(shape, jnp.float8_e4m3fn, transforms=transforms)


def flatten_pool(kv):
    """Reshape the pool for kernels: `[layers * 2 * pages * page_size, kv_heads * head_dim]`."""
    layers, _, num_pages, page_size, kv_heads, head_dim = kv.shape
    return kv.reshape(layers * 2 * num_pages * page_size, kv_heads * head_dim)


def flatten_rings(pool):
    """Reshape a `WindowPool` for kernels: `[layers * slots * ring, 2 * kv_heads * head_dim]`."""
    layers, num_slots, ring, _, kv_heads, head_dim = pool.shape
    return pool.reshape(layers * num_slots * ring, 2 * kv_heads * head_dim)


class PoolHead(NamedTuple):
    """One key head of one layer of the pool."""

    pool: Any  # from `flatten_pool` or `flatten_rings`, in global memory
    layer: Any
    head: Any


@dataclasses.dataclass(frozen=True)
class PageTiles:
    """Split of a row's positions into tiles of `block_kv`, and of a tile into copies.

    A copy stays within one page: with tiles of 64 and pages of 24 positions, it has 8 positions.
    """

    block_kv: int
    head_dim: int
    num_pages: int
    page_size: int
    num_slots: int
    table_width: int  # pages per row of the page table
    layer_pages: int = 0  # pages per layer: keys, then values
    value_pages: int = 0  # pages between a key page and its value page
    value_columns: int = 0  # columns between a key and its value

    @classmethod
    def of(cls, kv, page_tables, block_kv: int) -> "PageTiles":
        num_pages, page_size, _, head_dim = kv.shape[2:]
        sizes = block_kv, head_dim, num_pages, page_size, *page_tables.shape
        return cls(*sizes, layer_pages=2 * num_pages, value_pages=num_pages)

    @classmethod
    def of_rings(cls, pool, page_size: int, page_tables, block_kv: int) -> "PageTiles":
        """Return the tiles of a `WindowPool`, whose rings have whole pages."""
        num_slots, ring, _, kv_heads, head_dim = pool.shape[1:]
        pages = num_slots * ring // page_size
        sizes = block_kv, head_dim, pages, page_size, *page_tables.shape
        return cls(*sizes, layer_pages=pages, value_columns=kv_heads * head_dim)

    @property
    def context(self) -> int:
        """Maximum number of positions of a row."""
        return self.table_width * self.page_size

    @property
    def copy_size(self) -> int:
        """Positions per copy."""
        return math.gcd(self.block_kv, self.page_size)

    def barriers(self, stages: int):
        """Return one barrier per stage of a ring, which completes with all copies of its tile."""
        return plgpu.Barrier(num_arrivals=self.block_kv // self.copy_size, num_barriers=stages)

    def find_pages(self, page_tables, slot, tile) -> tuple:
        """Return the page of each copy of a tile.

        Indices are clamped, because the host's may be outside the page table and the pool.
        """
        positions = [tile * self.block_kv + i for i in range(0, self.block_kv, self.copy_size)]
        entries = [jnp.minimum(lax.div(x, self.page_size), self.table_width - 1) for x in positions]
        slot = jnp.clip(slot, 0, self.num_slots - 1)
        return tuple(jnp.clip(page_tables[slot, entry], 0, self.num_pages - 1) for entry in entries)

    def fetch(self, source: PoolHead, kind: int, tile, pages, target, produced):
        """Start copying a tile of KEYS or VALUES to `target` `[block_kv, head_dim]`.

        `pages` is the result of `find_pages`; the barrier `produced` completes with the copies.
        """
        for i, page in enumerate(pages):
            start = source.layer * self.layer_pages + kind * self.value_pages + page
            start = start * self.page_size
            if self.page_size > self.copy_size:
                start += lax.rem(tile * self.block_kv + i * self.copy_size, self.page_size)
            first = kind * self.value_columns + source.head * self.head_dim
            channels = pl.ds(first, self.head_dim)
            plgpu.copy_gmem_to_smem(
                source.pool.at[pl.ds(start, self.copy_size), channels],
                target.at[pl.ds(i * self.copy_size, self.copy_size)],
                produced,
            )
