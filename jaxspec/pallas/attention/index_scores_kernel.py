"""Kernel of the scores of a token index on Hopper GPUs.

Each block handles a few tokens of one row and one split of its positions. A third warpgroup copies
tiles of keys into a ring in shared memory, and two warpgroups multiply each its own tile by the
queries of all index heads. The products of a token and a tile stay in registers: memory gets only
their sum over the heads.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.paging.page_tiles import KEYS, PageTiles, PoolHead

_WARPGROUPS = 2  # warpgroups that compute, each its own tile
_TILE = 64  # positions per warpgroup: the M of wgmma
_STAGES = 3
_MOST_QUERIES = 256  # of a block: rows of one copy
_MOST_TOKENS = 4  # of a block, whose weights are in registers
_LEAST_TILES = 4  # per warpgroup and split
_LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class _Sizes:
    pages: PageTiles
    heads: int
    tokens: int  # per block
    blocks: int  # per row
    splits: int

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return -(-self.pages.context // _TILE)


class _Refs(NamedTuple):
    """Operands and outputs in global memory."""

    queries: Any  # [rows * blocks * tokens * heads, index_dim]
    weights: Any  # [rows * blocks * tokens, heads]
    keys: Any  # [positions of all layers, index_dim]
    layer: Any  # [1]
    pages: Any  # [rows, pages]
    length: Any  # [rows]
    scores: Any  # [rows * blocks * tokens, tiles, _TILE]


class _Smem(NamedTuple):
    """Barriers and shared memory, in allocation order."""

    q_produced: Any  # a barrier: the queries are copied
    produced: Any  # a barrier per stage: the tiles are in the ring
    consumed: Any  # a barrier per stage: both warpgroups have read their tiles
    queries: Any  # [tokens * heads, index_dim]
    ring: Any  # [_STAGES, _WARPGROUPS, _TILE, index_dim]
    scores: Any  # [_WARPGROUPS * tokens * _TILE]


class _Part(NamedTuple):
    """The split of a row that a block handles, and its tokens."""

    row: Any
    token: Any  # the first one
    first: Any  # the first pair of tiles
    count: Any  # number of pairs


@functools.partial(jax.jit, static_argnames="interpret")
def index_scores_kernel(queries, weights, keys, layer, pages, length, *, interpret=None):
    """Return the scores `[rows, width, context]` of positions before `length` of each row.

    Other scores are arbitrary. Operands are those of `TokenIndex`, `pages` those of each row.
    """
    num_rows, width, heads, dim = queries.shape
    layers, num_pages, page_size, _ = keys.shape
    tiling = PageTiles(_TILE, dim, num_pages, page_size, *pages.shape, layer_pages=num_pages)
    blocks = -(-width // max(1, min(_MOST_TOKENS, _MOST_QUERIES // heads)))
    tokens = -(-width // blocks)
    splits = _choose_splits(num_rows * blocks, tiling.context)
    sizes = _Sizes(tiling, heads, tokens, blocks, splits)
    rest, padded = blocks * tokens - width, num_rows * blocks * tokens
    queries = jnp.pad(queries, ((0, 0), (0, rest), (0, 0), (0, 0)))
    weights = jnp.pad(weights, ((0, 0), (0, rest), (0, 0)))
    operands = {
        "queries": queries.reshape(padded * heads, dim),
        "weights": weights.reshape(padded, heads),
        "keys": keys.reshape(layers * num_pages * page_size, dim),
        "layer": layer[None],
        "pages": pages,
        "length": length,
    }
    shape = num_rows * blocks * tokens, sizes.tiles, _TILE
    scores = plgpu.kernel(
        lambda *refs, smem: _run_block(sizes, _Refs(*refs), smem),
        kernel_name="index_scores",
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types={"smem": _smem(sizes)},
        grid=(blocks, splits, num_rows),
        grid_names=("block", "split", "row"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        # No reduction crosses warps.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands.values())
    scores = scores.reshape(num_rows, blocks * tokens, sizes.tiles * _TILE)
    return scores[:, :width, : tiling.context]


def _choose_splits(blocks: int, context: int) -> int:
    """Return how many blocks share a row's positions: two per multiprocessor, if they suffice."""
    useful = context // (_LEAST_TILES * _WARPGROUPS * _TILE)
    return max(1, min(2 * device.MULTIPROCESSORS // blocks, useful))


def _smem(sizes) -> _Smem:
    dim = sizes.pages.head_dim
    copies = _WARPGROUPS * (_TILE // sizes.pages.copy_size)
    return _Smem(
        q_produced=plgpu.Barrier(),
        produced=plgpu.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        consumed=plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
        queries=tensor_cores.tile(sizes.tokens * sizes.heads, dim),
        ring=tensor_cores.tile(_STAGES, _WARPGROUPS, _TILE, dim),
        scores=plgpu.SMEM((_WARPGROUPS * sizes.tokens * _TILE,), jnp.float32),
    )


def _run_block(sizes, refs, smem):
    axes = "block", "split", "row", "warpgroup"
    block, split, row, warpgroup = (lax.axis_index(name) for name in axes)
    length = jnp.clip(refs.length[row], 0, sizes.pages.context)
    pairs = lax.div(length + _WARPGROUPS * _TILE - 1, jnp.int32(_WARPGROUPS * _TILE))
    of_split = lax.div(pairs + sizes.splits - 1, jnp.int32(sizes.splits))
    first = split * of_split
    count = jnp.clip(pairs - first, 0, of_split)
    part = _Part(row, (row * sizes.blocks + block) * sizes.tokens, first, count)

    @pl.when((warpgroup == _WARPGROUPS) & (count > 0))
    def _():
        _copy(sizes, part, refs, smem)

    @pl.when((warpgroup < _WARPGROUPS) & (count > 0))
    def _():
        _compute(sizes, part, warpgroup, refs, smem)


def _copy(sizes, part, refs, smem):
    """Copy the queries, then fill the ring, each stage once both warpgroups have read it."""
    queries = pl.ds(part.token * sizes.heads, sizes.tokens * sizes.heads)
    plgpu.copy_gmem_to_smem(refs.queries.at[queries], smem.queries, smem.q_produced)
    source = PoolHead(refs.keys, refs.layer[0], 0)

    @pl.loop(0, part.count)
    def _(j):
        stage = lax.rem(j, jnp.int32(_STAGES))

        @pl.when(j >= _STAGES)
        def _():
            plgpu.barrier_wait(smem.consumed.at[stage])

        for i in range(_WARPGROUPS):
            tile = (part.first + j) * _WARPGROUPS + i
            found = sizes.pages.find_pages(refs.pages, part.row, tile)
            target = smem.ring.at[stage, i]
            sizes.pages.fetch(source, KEYS, tile, found, target, smem.produced.at[stage])


def _compute(sizes, part, warpgroup, refs, smem):
    """Store the scores of every other tile."""
    heads = sizes.heads
    weights = [
        access.load(refs.weights.at[part.token + t], _LAYOUT.reduce(0)) for t in range(sizes.tokens)
    ]
    plgpu.barrier_wait(smem.q_produced)

    @pl.loop(0, part.count)
    def _(j):
        stage = lax.rem(j, jnp.int32(_STAGES))
        tile = (part.first + j) * _WARPGROUPS + warpgroup
        plgpu.barrier_wait(smem.produced.at[stage])
        plgpu.wait_smem_to_gmem(0)  # the scores before these are copied
        for t, weight in enumerate(weights):
            queries = smem.queries.at[pl.ds(t * heads, heads)].transpose((1, 0))
            products = tensor_cores.product(smem.ring.at[stage, warpgroup], queries)
            positive = jnp.maximum(products, 0.0)
            weighted = positive * lax.broadcast_in_dim(weight, positive.shape, (1,))
            target = smem.scores.at[pl.ds((warpgroup * sizes.tokens + t) * _TILE, _TILE)]
            target[...] = weighted.sum(axis=1)

        @pl.when(j + _STAGES < part.count)
        def _():
            plgpu.barrier_arrive(smem.consumed.at[stage])

        plgpu.commit_smem()

        # The last tile of a row may be past the end of its pages.
        @pl.when(tile < sizes.tiles)
        def _():
            for t in range(sizes.tokens):
                source = smem.scores.at[pl.ds((warpgroup * sizes.tokens + t) * _TILE, _TILE)]
                plgpu.copy_smem_to_gmem(source, refs.scores.at[part.token + t, tile])

    plgpu.wait_smem_to_gmem(0)
