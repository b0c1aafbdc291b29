"""What the blocks of `paged_attention_kernel` share: sizes, their part of the work, output."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import output_gate
from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.paging.page_tiles import PageTiles

_AT_ONCE = 4  # tokens put out in one turn of a loop


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
    width: int  # tokens of a row
    group: int  # heads that share a key head
    tokens: int  # of a tile of queries, each with all heads of the group
    pages: PageTiles

    @property
    def tiles(self) -> int:
        """Of queries, for a row."""
        return -(-self.width // self.tokens)

    @property
    def height(self) -> int:
        """Of a tile of queries, whose rows are heads by token; a multiple of 8."""
        return -(-self.tokens * self.group // 8) * 8

    def barriers(self):
        """For the tile of queries, and for each tile of the rings of keys and of values."""
        ring = self.pages.barriers(self.plan.stages)
        return plgpu.Barrier(num_arrivals=self.tokens), ring, ring


@dataclasses.dataclass(frozen=True)
class Share:
    """What one block does: values on the device, and how it gets its tiles."""

    row: jax.Array
    head: jax.Array  # of keys
    first_token: jax.Array  # of the row, in the tile of queries
    first: jax.Array  # tile of positions
    count: jax.Array  # of those tiles
    start: jax.Array  # position of the row's first token
    length: jax.Array  # of the row, with its tokens
    query_len: jax.Array  # tokens of the row
    find: Callable  # (tile of the share) -> its pages
    fetch: Callable  # (keys or values, tile of the share, stage, pages): starts the copies
    outputs: tuple  # where what it attended goes; of several shares, where its sums go too
    gates: Any  # of all tokens `[tokens, heads, gate behind query]`, or None

    def sees(self, sizes, row):
        """The newest position that a row of the tile of queries sees."""
        token = self.first_token + lax.div(row, jnp.int32(sizes.group))
        return jnp.where(token < self.query_len, self.start + token, -1)

    def put_out(self, sizes, attended):
        """The only share's output, gated, from plain shared memory."""
        width, group, dim = sizes.width, sizes.group, sizes.pages.head_dim
        (out,) = self.outputs

        def put(t, token):
            for start, count in layouts.pieces_of(group):
                heads = pl.ds(self.head * group + start, count)
                layout = layouts.piece_layout(count, dim, out.dtype.itemsize)
                piece = attended.at[pl.ds(t * group + start, count)]
                piece = access.load(piece, layout)
                if self.gates is not None:
                    gate = self.gates.at[token, heads, pl.ds(dim, dim)]
                    gate = access.load(gate, layout)
                    piece = output_gate.in_kernel(piece, gate).astype(out.dtype)
                access.store(out.at[token, heads], piece)

        def put_some(i, _, count=_AT_ONCE):
            for t in (i * _AT_ONCE + j for j in range(count)):
                token = self.first_token + t
                put_one = functools.partial(put, t, self.row * width + token)
                put_one() if sizes.tiles == 1 else pl.when(token < width)(put_one)

        whole, rest = divmod(sizes.tokens, _AT_ONCE)
        lax.fori_loop(0, whole, put_some, None)
        put_some(whole, None, rest)


def begin(sizes, block, refs, *, asked, keys, values, arrived, **scratch):
    """Find what this block does, start filling its ring, and run it.

    `refs`: operands and outputs, by name.
    """
    part, split, head, row = (lax.axis_index(name) for name in ("tile", "split", "head", "row"))
    first_token = part * sizes.tokens
    _fetch_queries(sizes, refs, row, head, first_token, asked, arrived[0])
    plan, pages, slot = sizes.plan, sizes.pages, refs.slots[row]
    live = (slot > 0) & (slot < pages.num_slots)
    # Clamped: a row's position is not trusted either, and must not overflow.
    start = jnp.clip(refs.num_computed[row], -sizes.width, pages.context)
    query_len = jnp.where(live, jnp.clip(refs.query_len[row], 0, sizes.width), 0)
    length = jnp.where(query_len > 0, jnp.clip(start + query_len, 0, pages.context), 0)
    in_row = lax.div(length + plan.keys - 1, plan.keys)
    in_share = lax.div(in_row + plan.splits - 1, plan.splits)
    first = split * in_share
    count = jnp.clip(in_row - first, 0, in_share)

    def find(j):
        return pages.find(refs.tables, slot, first + j)

    def fetch(which, j, stage, found):
        ring, barriers = (keys, values)[which], arrived[1 + which]
        pages.fetch(
            *(refs.pool, refs.layer[0], head, which),
            *(first + j, found, ring.at[stage], barriers.at[stage]),
        )

    for stage in range(plan.stages):

        @pl.when(stage < count)
        def _(stage=stage):
            found = find(stage)
            fetch(0, stage, stage, found)
            fetch(1, stage, stage, found)

    outputs = (refs.out,)
    if plan.splits > 1:
        rows = pl.ds(part * sizes.height, sizes.height)
        outputs = refs.out.at[split, row, head, rows], refs.sums.at[split, row, head, part]
    share = Share(
        row=row,
        head=head,
        first_token=first_token,
        first=first,
        count=count,
        start=start,
        length=length,
        query_len=query_len,
        find=find,
        fetch=fetch,
        outputs=outputs,
        gates=refs.gates,
    )
    block(sizes, share, asked, keys, values, arrived, **scratch)


def _fetch_queries(sizes, refs, row, head, first_token, asked, arrived):
    """Start their copies, side by side; of a tile with fewer tokens the row's last again."""
    heads = pl.ds(head * sizes.group, sizes.group)
    for t in range(sizes.tokens):
        token = row * sizes.width + jnp.minimum(first_token + t, sizes.width - 1)
        to = asked.at[pl.ds(t * sizes.group, sizes.group)]
        plgpu.copy_gmem_to_smem(refs.queries.at[token, heads], to, arrived)


def lay_out(sizes, source, target):
    """Rows of queries, or what these attended to, from one form in shared memory to the other.

    As they lie side by side, and swizzled in tiles of eight rows, as tensor cores want them.
    """
    layout = layouts.piece_layout(8, sizes.pages.head_dim, itemsize=2)
    for rows in (pl.ds(start, 8) for start in range(0, sizes.height, 8)):
        piece = access.load(source.at[rows], layout)
        if source.dtype != target.dtype:
            most = 65280.0  # bfloat16's largest below that of float16
            piece = jnp.clip(piece.astype(jnp.float32), -most, most).astype(target.dtype)
        access.store(target.at[rows], piece)
    plgpu.commit_smem()
