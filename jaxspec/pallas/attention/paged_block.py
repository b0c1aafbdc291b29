"""Parts of a `paged_attention_kernel` block that all dtypes share.

A block first starts the copies of its queries and of its first tiles of keys and values (`run`).
`paged_block_<dtype>.py` then attends over them, and stores heads or, where several blocks share a
row, one split.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import output_gate
from jaxspec.pallas.attention.paged_tiling import Tiling
from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.paging.page_tiles import KEYS, VALUES, PageTiles, PoolHead

_STORE_UNROLL = 4  # tokens stored per loop iteration
_MAX_FLOAT16 = 65280.0  # the largest bfloat16 that is finite in float16


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    tiling: Tiling
    width: int  # tokens per row
    group: int  # query heads that share a key head
    tokens: int  # tokens per query tile, each with all heads of the group
    pages: PageTiles
    window: int | None  # positions that a token attends to, its own included; None means all

    @property
    def query_tiles(self) -> int:
        return -(-self.width // self.tokens)

    @property
    def query_rows(self) -> int:
        """Rows of a query tile: all heads of the group per token, rounded up to a multiple of 8."""
        return -(-self.tokens * self.group // 8) * 8

    def query_barrier(self):
        return plgpu.Barrier(num_arrivals=self.tokens)

    def ring_barriers(self):
        return self.pages.barriers(self.tiling.stages)


class Refs(NamedTuple):
    """Operands and outputs of the kernel, as references to global memory."""

    queries: Any  # [tokens of all rows, heads, head_dim]
    pool: Any  # from `flatten_pool` or `flatten_rings`
    layer: Any  # [1]
    page_tables: Any  # [slots, pages]
    slots: Any  # [rows], like the next two
    num_computed: Any
    query_len: Any
    out: Any  # like `queries`; if split: [splits, rows, kv_heads, query rows per row, head_dim]
    lse: Any = None  # if split: [splits, rows, kv_heads, query tiles, query rows per tile]
    gates: Any = None  # if gated here: [tokens, heads, 2 * head_dim], query then gate
    scales: Any = None  # [2] in float32, of keys and of values, if they are scaled


class BlockIndex(NamedTuple):
    query_tile: jax.Array
    split: jax.Array
    head: jax.Array  # the key head
    row: jax.Array
    first_token: jax.Array  # first token of the query tile, counted within the row


class Row(NamedTuple):
    """Indices of one row, clamped because the host's numbers may be out of range."""

    slot: jax.Array
    start: jax.Array  # position of its first token
    query_len: jax.Array
    length: jax.Array  # number of positions up to its last token, 0 for padding


@dataclasses.dataclass(frozen=True)
class KVSplit:
    """Tiles of keys and values that one block reads, through a ring in shared memory."""

    sizes: BlockSizes
    refs: Refs
    smem: Any  # has the rings `keys`, `values` and their barriers `k_produced`, `v_produced`
    slot: jax.Array
    head: jax.Array
    first: jax.Array  # index in the row of the split's first tile
    count: jax.Array  # number of tiles

    def find_pages(self, tile):
        return self.sizes.pages.find_pages(self.refs.page_tables, self.slot, self.first + tile)

    def fetch_keys(self, tile, stage, pages):
        target, produced = self.smem.keys.at[stage], self.smem.k_produced.at[stage]
        self._fetch(KEYS, tile, pages, target, produced)

    def fetch_values(self, tile, stage, pages):
        target, produced = self.smem.values.at[stage], self.smem.v_produced.at[stage]
        self._fetch(VALUES, tile, pages, target, produced)

    def _fetch(self, kind, tile, pages, target, produced):
        source = PoolHead(self.refs.pool, self.refs.layer[0], self.head)
        self.sizes.pages.fetch(source, kind, self.first + tile, pages, target, produced)

    def fill_ring(self):
        for stage in range(self.sizes.tiling.stages):

            @pl.when(stage < self.count)
            def _(stage=stage):
                pages = self.find_pages(stage)
                self.fetch_keys(stage, stage, pages)
                self.fetch_values(stage, stage, pages)


@dataclasses.dataclass(frozen=True)
class Block:
    """State of a block once its first copies have started."""

    sizes: BlockSizes
    refs: Refs
    smem: Any
    index: BlockIndex
    row: Row
    kv: KVSplit
    out: Any  # destination of the result: all of `refs.out`, or the rows of the split
    lse: Any  # destination of the split's log-sum-exp, or None

    def newest_position(self, query_row):
        """Return the last position that a row of the query tile attends to, -1 for padding."""
        token = self.index.first_token + lax.div(query_row, jnp.int32(self.sizes.group))
        return jnp.where(token < self.row.query_len, self.row.start + token, -1)

    def is_seen(self, position, newest):
        """Return whether tokens whose last position is `newest` attend to `position`."""
        seen, window = position <= newest, self.sizes.window
        return seen if window is None else seen & (position > newest - window)

    def store_heads(self, attended):
        """Store the heads of a row that is not split, gated if the kernel has gates.

        `attended` `[query_rows, head_dim]` is in shared memory, row-major and not swizzled.
        """
        sizes, index = self.sizes, self.index

        def store(t, token):
            for start, count in layouts.pieces_of(sizes.group):
                heads = pl.ds(index.head * sizes.group + start, count)
                source = attended.at[pl.ds(t * sizes.group + start, count)]
                self._store_some_heads(token, heads, source)

        def store_several(i, _, count=_STORE_UNROLL):
            for t in (i * _STORE_UNROLL + j for j in range(count)):
                token = index.first_token + t
                store_token = functools.partial(store, t, index.row * sizes.width + token)
                if sizes.query_tiles == 1:
                    store_token()
                else:
                    pl.when(token < sizes.width)(store_token)

        turns, rest = divmod(sizes.tokens, _STORE_UNROLL)
        lax.fori_loop(0, turns, store_several, None)
        store_several(turns, None, rest)

    def _store_some_heads(self, token, heads, attended):
        """Store neighbouring heads of one token; their number must be a power of two."""
        dim, dtype = self.sizes.pages.head_dim, self.refs.out.dtype
        layout = layouts.piece_layout(heads.size, dim, dtype.itemsize)
        result = access.load(attended, layout)
        if self.refs.gates is not None:
            gate = access.load(self.refs.gates.at[token, heads, pl.ds(dim, dim)], layout)
            result = output_gate.gate_in_kernel(result, gate).astype(dtype)
        access.store(self.refs.out.at[token, heads], result)

    def copy_split(self, attended, lse):
        """Copy one split of a row from shared memory to where the merge kernel reads it."""
        plgpu.copy_smem_to_gmem(attended, self.out)
        plgpu.copy_smem_to_gmem(lse, self.lse)
        plgpu.wait_smem_to_gmem(0)


def run(sizes: BlockSizes, attend: Callable[[Block], None], refs: Refs, smem: Any):
    """Run one block: start its copies, then call `attend`.

    `smem` has the query tile `q_rows` with its barrier `q_produced`, and the rings of `KVSplit`.
    """
    axes = "tile", "split", "head", "row"
    query_tile, split, head, row = (lax.axis_index(name) for name in axes)
    index = BlockIndex(query_tile, split, head, row, query_tile * sizes.tokens)
    _fetch_queries(sizes, index, refs, smem)
    row = _read_row(sizes, index, refs)
    kv = _split_of(sizes, index, row, refs, smem)
    kv.fill_ring()
    out, lse = refs.out, None
    if sizes.tiling.splits > 1:
        query_rows = pl.ds(query_tile * sizes.query_rows, sizes.query_rows)
        out = refs.out.at[split, index.row, head, query_rows]
        lse = refs.lse.at[split, index.row, head, query_tile]
    attend(Block(sizes, refs, smem, index, row, kv, out, lse))


def _fetch_queries(sizes, index, refs, smem):
    """Start the copies of a query tile; a tile with too few tokens repeats the row's last one."""
    heads = pl.ds(index.head * sizes.group, sizes.group)
    for t in range(sizes.tokens):
        token = index.row * sizes.width + jnp.minimum(index.first_token + t, sizes.width - 1)
        target = smem.q_rows.at[pl.ds(t * sizes.group, sizes.group)]
        plgpu.copy_gmem_to_smem(refs.queries.at[token, heads], target, smem.q_produced)


def _read_row(sizes, index, refs) -> Row:
    pages, slot = sizes.pages, refs.slots[index.row]
    live = (slot > 0) & (slot < pages.num_slots)
    # Clamped so that sums do not overflow.
    start = jnp.clip(refs.num_computed[index.row], -sizes.width, pages.context)
    query_len = jnp.where(live, jnp.clip(refs.query_len[index.row], 0, sizes.width), 0)
    length = jnp.where(query_len > 0, jnp.clip(start + query_len, 0, pages.context), 0)
    return Row(slot, start, query_len, length)


def _split_of(sizes, index, row, refs, smem) -> KVSplit:
    """Return the split's share of the row's tiles: equal shares, but fewer for the last splits."""
    tiling = sizes.tiling
    row_tiles = lax.div(row.length + tiling.block_kv - 1, tiling.block_kv)
    split_tiles = lax.div(row_tiles + tiling.splits - 1, tiling.splits)
    first = index.split * split_tiles
    count = jnp.clip(row_tiles - first, 0, split_tiles)
    return KVSplit(sizes, refs, smem, row.slot, index.head, first, count)


def copy_rows(sizes, source, target, factor=None):
    """Copy a query tile between two buffers in shared memory, through registers.

    One buffer is row-major, as in global memory. The other is swizzled in tiles of eight rows, as
    tensor cores read it. Rows are multiplied by `factor`, if there is one, before they are rounded.
    """
    layout = layouts.piece_layout(8, sizes.pages.head_dim, itemsize=2)
    for rows in (pl.ds(start, 8) for start in range(0, sizes.query_rows, 8)):
        piece = access.load(source.at[rows], layout)
        if source.dtype != target.dtype:
            piece = jnp.clip(piece.astype(jnp.float32), -_MAX_FLOAT16, _MAX_FLOAT16)
        if factor is not None:
            piece = piece.astype(jnp.float32) * factor
        access.store(target.at[rows], piece.astype(target.dtype))
    plgpu.commit_smem()
