"""What the blocks of `paged_attention_kernel` share: sizes, their part of the work, its tiles."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut: positions in a tile, tiles in the ring, blocks that share a row."""

    keys: int
    stages: int
    splits: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes a block knows."""

    plan: Plan
    height: int  # of a tile of queries, without its padding
    width: int
    group: int
    head_dim: int
    layers: int
    num_pages: int
    page_size: int
    num_slots: int
    table: int  # pages of a row in the table

    @property
    def piece(self) -> int:
        """Positions one copy brings: they lie in one page."""
        return math.gcd(self.plan.keys, self.page_size)

    def barriers(self):
        """For the tile of queries, and for each tile of the rings of keys and of values."""
        copies = self.plan.keys // self.piece
        ring = plgpu.Barrier(num_arrivals=copies, num_barriers=self.plan.stages)
        return plgpu.Barrier(), ring, ring


@dataclasses.dataclass(frozen=True)
class Share:
    """What one block does: values on the device, and how it gets its tiles."""

    part: jax.Array  # which tile of queries
    first: jax.Array  # tile of positions
    count: jax.Array  # of those tiles
    start: jax.Array  # position of the row's first token
    length: jax.Array  # of the row, with its tokens
    tokens: jax.Array
    find: Callable  # (tile of the share) -> its pages
    fetch: Callable  # (keys or values, tile of the share, stage, pages): starts the copies


def begin(
    sizes, block, queries, pool, layer, tables, slots, num_computed, query_len, out, sums_out,
    *, tile, keys, values, arrived, **scratch
):  # fmt: skip
    """Find what this block does, start filling its ring, and run it."""
    part, split, head, row = (lax.axis_index(name) for name in ("tile", "split", "head", "row"))
    rows = pl.ds(part * sizes.height, sizes.height)
    plgpu.copy_gmem_to_smem(
        queries.at[row, head, rows], tile.at[pl.ds(0, sizes.height)], arrived[0]
    )

    plan, context = sizes.plan, sizes.table * sizes.page_size
    slot = slots[row]
    live = (slot > 0) & (slot < sizes.num_slots)
    slot = jnp.clip(slot, 0, sizes.num_slots - 1)
    # Clamped: a row's position is not trusted either, and must not overflow.
    start = jnp.clip(num_computed[row], -sizes.width, context)
    tokens = jnp.where(live, jnp.clip(query_len[row], 0, sizes.width), 0)
    length = jnp.where(tokens > 0, jnp.clip(start + tokens, 0, context), 0)
    in_row = lax.div(length + plan.keys - 1, plan.keys)
    in_share = lax.div(in_row + plan.splits - 1, plan.splits)
    first = split * in_share
    count = jnp.clip(in_row - first, 0, in_share)

    def find(j):
        return _pages(sizes, tables, slot, first + j)

    def fetch(which, j, stage, pages):
        ring = (keys, values)[which]
        _fetch(
            sizes,
            pool,
            layer[0],
            head,
            which,
            first + j,
            pages,
            ring.at[stage],
            arrived[1 + which].at[stage],
        )

    for stage in range(plan.stages):

        @pl.when(stage < count)
        def _(stage=stage):
            pages = find(stage)
            fetch(0, stage, stage, pages)
            fetch(1, stage, stage, pages)

    share = Share(part, first, count, start, length, tokens, find, fetch)
    outputs = out.at[split, row, head, rows], sums_out.at[split, row, head, part]
    block(sizes, share, *outputs, tile, keys, values, arrived, **scratch)


def _pages(sizes, tables, slot, tile):
    """The pages of a tile, one a copy; beyond the table its last, beyond the pool its last."""
    places = [tile * sizes.plan.keys + i for i in range(0, sizes.plan.keys, sizes.piece)]
    entries = [jnp.minimum(lax.div(x, sizes.page_size), sizes.table - 1) for x in places]
    return tuple(jnp.clip(tables[slot, entry], 0, sizes.num_pages - 1) for entry in entries)


def _fetch(sizes, pool, layer, head, which, tile, pages, stage, arrived):
    """Start copying a tile of keys (`which` 0) or values (1)."""
    for i, page in enumerate(pages):
        begin = ((layer * 2 + which) * sizes.num_pages + page) * sizes.page_size
        if sizes.page_size > sizes.piece:
            begin += lax.rem(tile * sizes.plan.keys + i * sizes.piece, sizes.page_size)
        plgpu.copy_gmem_to_smem(
            pool.at[pl.ds(begin, sizes.piece), pl.ds(head * sizes.head_dim, sizes.head_dim)],
            stage.at[pl.ds(i * sizes.piece, sizes.piece)],
            arrived,
        )
