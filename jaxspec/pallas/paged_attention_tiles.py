"""What the blocks of `paged_attention_kernel` share: sizes, and their part of the work."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.page_tiles import PageTiles


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
    pages: PageTiles

    def barriers(self):
        """For the tile of queries, and for each tile of the rings of keys and of values."""
        ring = self.pages.barriers(self.plan.stages)
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

    plan, pages = sizes.plan, sizes.pages
    slot = slots[row]
    live = (slot > 0) & (slot < pages.num_slots)
    # Clamped: a row's position is not trusted either, and must not overflow.
    start = jnp.clip(num_computed[row], -sizes.width, pages.context)
    tokens = jnp.where(live, jnp.clip(query_len[row], 0, sizes.width), 0)
    length = jnp.where(tokens > 0, jnp.clip(start + tokens, 0, pages.context), 0)
    in_row = lax.div(length + plan.keys - 1, plan.keys)
    in_share = lax.div(in_row + plan.splits - 1, plan.splits)
    first = split * in_share
    count = jnp.clip(in_row - first, 0, in_share)

    def find(j):
        return pages.find(tables, slot, first + j)

    def fetch(which, j, stage, found):
        ring, barriers = (keys, values)[which], arrived[1 + which]
        pages.fetch(
            *(pool, layer[0], head, which, first + j, found, ring.at[stage], barriers.at[stage])
        )

    for stage in range(plan.stages):

        @pl.when(stage < count)
        def _(stage=stage):
            found = find(stage)
            fetch(0, stage, stage, found)
            fetch(1, stage, stage, found)

    share = Share(part, first, count, start, length, tokens, find, fetch)
    outputs = out.at[split, row, head, rows], sums_out.at[split, row, head, part]
    block(sizes, share, *outputs, tile, keys, values, arrived, **scratch)
