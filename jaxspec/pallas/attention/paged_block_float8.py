"""Block of paged attention over a float8_e4m3fn pool: half the bytes of bfloat16.

The matmuls run in 16 bits. Widening tiles in shared memory would load it more than global memory
(about 7 bytes read and written for each byte of the pool), so keys and values are widened in
registers, as left operands of wgmma. This transposes everything: rows are positions or channels,
and columns are queries. A row has few queries, and wgmma takes 8 or 16 columns as well as 64.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.attention.paged_block import Block, BlockSizes, copy_rows
from jaxspec.pallas.gpu import access, tensor_cores
from jaxspec.pallas.paging.page_tiles import float8_tile

_PER_QUERY = plgpu.Layout.WGMMA.reduce(0)  # one value per query


class Smem(NamedTuple):
    """Barriers and shared memory of a block, in allocation order."""

    q_produced: Any
    k_produced: Any
    v_produced: Any
    q_rows: Any  # [query_rows, head_dim], row-major, as copied
    keys: Any  # [stages, block_kv, head_dim], in 8 bits
    keys_operand: Any  # substitute for keys in registers under the interpreter, else None
    values_operand: Any  # likewise for values
    lse: Any  # [query_rows]
    q_tile: Any  # [query_rows, head_dim] in float16; finally the output
    values: Any  # like `keys`
    weights: Any  # [query_rows, block_kv] in float16


def smem(sizes: BlockSizes, interpreted: bool) -> Smem:
    tiling, dim = sizes.tiling, sizes.pages.head_dim
    ring = float8_tile(tiling.stages, tiling.block_kv, dim)
    positions, channels = tiling.block_kv, _part_size(dim)
    operands = None, None
    if interpreted:
        operands = (
            tensor_cores.tile(positions, channels, dtype=jnp.float16),
            tensor_cores.tile(channels, positions, dtype=jnp.float16),
        )
    return Smem(
        q_produced=sizes.query_barrier(),
        k_produced=sizes.ring_barriers(),
        v_produced=sizes.ring_barriers(),
        q_rows=plgpu.SMEM((sizes.query_rows, dim), jnp.bfloat16),
        keys=ring,
        keys_operand=operands[0],
        values_operand=operands[1],
        lse=plgpu.SMEM((sizes.query_rows,), jnp.float32),
        q_tile=tensor_cores.tile(sizes.query_rows, dim, dtype=jnp.float16),
        values=ring,
        weights=tensor_cores.tile(sizes.query_rows, tiling.block_kv, dtype=jnp.float16),
    )


def attend(block: Block):
    """Attend over the block's tiles in float16, with float32 sums, and store the result.

    float16 represents every float8_e4m3fn number. The output stays in float16 until it is stored
    or the splits are merged. All barriers are explicit: Mosaic adds none here.
    """
    sizes, smem, kv = block.sizes, block.smem, block.kv
    tiling, dim = sizes.tiling, sizes.pages.head_dim
    shape, channels = (tiling.block_kv, sizes.query_rows), _part_size(dim)
    parts = [pl.ds(start, channels) for start in range(0, dim, channels)]
    position, query = (_iota(shape, i) for i in range(2))
    scales = block.refs.scales
    factor = dim**-0.5 * softmax.LOG2E
    factor = factor if scales is None else factor * scales[0]
    newest = block.newest_position(query)
    plgpu.barrier_wait(smem.q_produced)
    copy_rows(sizes, smem.q_rows, smem.q_tile)

    def attend_tile(j, carry):
        (acc, m_i, l_i), pages = carry
        stage, base = lax.rem(j, tiling.stages), (kv.first + j) * tiling.block_kv
        next_tile = j + tiling.stages  # next tile in this stage
        plgpu.barrier_wait(smem.k_produced.at[stage])
        scores = _products(smem, stage, parts)
        scores = jnp.where(block.is_seen(position, newest - base), scores, -jnp.inf)
        scores = scores * factor
        m_new = jnp.maximum(m_i, scores.max(axis=0))
        m_safe = softmax.finite(m_new)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(m_safe, shape, (1,)))
        rescale = jnp.exp2(m_i - m_safe)
        l_i = l_i * lax.broadcast_in_dim(rescale, shape, (1,)) + weights
        smem.weights.transpose((1, 0))[...] = weights.astype(jnp.float16)
        plgpu.commit_smem()  # also a barrier: all threads have read the keys
        _refill(kv, kv.fetch_keys, next_tile, stage, pages)
        plgpu.barrier_wait(smem.v_produced.at[stage])
        new_acc = []
        for part_acc, part in zip(acc, parts, strict=True):
            value = _load_values(smem.values.at[stage, :, part], block.row.length - base)
            part_acc = part_acc * lax.broadcast_in_dim(rescale, part_acc.shape, (1,))
            term = part_acc, value, smem.weights.transpose((1, 0))
            new_acc += tensor_cores.accumulate(smem.values_operand, term)
        plgpu.commit_smem()  # barrier: all threads have read the values
        _refill(kv, kv.fetch_values, next_tile, stage, pages)
        return softmax.State(tuple(new_acc), m_new, l_i), kv.find_pages(next_tile + 1)

    # `acc` is split into parts of the channels; `l_i` has a sum per position of a tile and query.
    empty = softmax.State(
        (softmax.full((channels, sizes.query_rows), 0.0, plgpu.Layout.WGMMA),) * len(parts),
        softmax.full((sizes.query_rows,), -jnp.inf, _PER_QUERY),
        softmax.full(shape, 0.0, plgpu.Layout.WGMMA),
    )
    carry = empty, kv.find_pages(tiling.stages)
    state, _ = lax.fori_loop(0, kv.count, attend_tile, carry)
    _store_to_smem(state, parts, smem)
    if tiling.splits == 1:
        copy_rows(sizes, smem.q_tile, smem.q_rows, None if scales is None else scales[1])
        block.store_heads(smem.q_rows)
    else:
        block.copy_split(smem.q_tile, smem.lse)


def _refill(kv, fetch, tile, stage, pages):
    """Start the copies of a tile, if it exists; one warp issues them, which saves instructions."""

    @plgpu.warp_map
    def _(warp):
        pl.when((warp == 0) & (tile < kv.count))(lambda: fetch(tile, stage, pages))


def _products(smem, stage, parts):
    """Multiply a tile's keys with all queries: `[positions, queries]` in float32."""
    shape = smem.keys.shape[1], smem.q_tile.shape[0]
    products: Any = softmax.full(shape, 0.0, plgpu.Layout.WGMMA)
    for part in parts:
        key, queries = _load_keys(smem.keys.at[stage, :, part]), smem.q_tile.at[:, part]
        term = products, key, queries.transpose((1, 0))
        (products,) = tensor_cores.accumulate(smem.keys_operand, term)
    return products


def _store_to_smem(state, parts, smem):
    acc, m_i, l_i = state
    l_i = l_i.sum(axis=0)
    l_i = jnp.where(l_i == 0, 1.0, l_i)
    for part_acc, part in zip(acc, parts, strict=True):
        output = part_acc * lax.broadcast_in_dim(1 / l_i, part_acc.shape, (1,))
        smem.q_tile.at[:, part].transpose((1, 0))[...] = output.astype(jnp.float16)
    smem.lse[...] = m_i + jnp.log(l_i) * softmax.LOG2E
    plgpu.commit_smem()


def _part_size(head_dim):
    """Channels of a head processed at once; registers limit them."""
    return min(128, head_dim)


def _iota(shape, dimension):
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def _load_keys(tile):
    """Load a tile `[positions, channels]` as float16, the left operand of wgmma."""
    key = access.load(tile, plgpu.Layout.WGMMA_UPCAST_2X)
    return plgpu.layout_cast(key, plgpu.Layout.WGMMA).astype(jnp.float16)


def _load_values(tile, written):
    """Load a tile as float16, transposed to `[channels, positions]`; 0 from `written` on.

    Later positions may hold non-finite values of another request, and 0 * NaN is NaN.
    """
    value = access.load(tile.transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED)
    value = plgpu.layout_cast(value.astype(jnp.float16), plgpu.Layout.WGMMA)

    def clear(value):
        return jnp.where(_iota(value.shape, 1) < written, value, jnp.zeros((), value.dtype))

    return lax.cond(written < value.shape[1], clear, lambda value: value, value)
