"""Block of paged attention in float32: multiply-adds, as tensor cores keep 10 mantissa bits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.attention.paged_block import Block, BlockSizes
from jaxspec.pallas.gpu import access, layouts

_LANES = 8  # positions processed at once: two for each of the four warps


class Smem(NamedTuple):
    """Barriers and shared memory of a block, in allocation order."""

    q_produced: Any
    k_produced: Any
    v_produced: Any
    q_rows: Any  # [query_rows, head_dim]; finally the output
    keys: Any  # [stages, block_kv, head_dim]
    values: Any  # like `keys`


def smem(sizes: BlockSizes) -> Smem:
    tiling, dim = sizes.tiling, sizes.pages.head_dim
    ring = plgpu.SMEM((tiling.stages, tiling.block_kv, dim), jnp.float32)
    return Smem(
        q_produced=sizes.query_barrier(),
        k_produced=sizes.ring_barriers(),
        v_produced=sizes.ring_barriers(),
        q_rows=plgpu.SMEM((sizes.query_rows, dim), jnp.float32),
        keys=ring,
        values=ring,
    )


def attend(block: Block):
    """Attend over the block's tiles and store the result.

    Each of `_LANES` neighbouring positions keeps a separate softmax for every query, `[_LANES]` and
    `[_LANES, head_dim]`, so that nothing crosses warps before the end (`_merge_lanes`).
    """
    sizes, smem, kv = block.sizes, block.smem, block.kv
    tiling, dim = sizes.tiling, sizes.pages.head_dim
    layout = layouts.row_layout(dim, 4)
    lane = plgpu.broadcasted_iota(jnp.int32, (_LANES,), 0, layout=layout.reduce(1))
    newest = [block.newest_position(jnp.int32(r)) for r in range(sizes.query_rows)]
    plgpu.barrier_wait(smem.q_produced)

    def attend_lanes(i, states, stage, base):
        rows = pl.ds(i * _LANES, _LANES)
        key, value = (access.load(x.at[stage, rows], layout) for x in (smem.keys, smem.values))
        position = lane + (base + i * _LANES)
        # Values after the row's length may be non-finite leftovers, and 0 * NaN is NaN.
        written = lax.broadcast_in_dim(position, value.shape, (0,)) < block.row.length
        # Values of a draft may be non-finite too, and earlier tokens do not attend to them.
        first = lax.broadcast_in_dim(position, value.shape, (0,)) <= block.row.start
        value = jnp.where(written & (first | (jnp.abs(value) < jnp.inf)), value, 0.0)
        updated = []
        for r, state in enumerate(states):
            query = access.load(smem.q_rows.at[r], layout.reduce(0))
            score = jnp.sum(key * lax.broadcast_in_dim(query, key.shape, (1,)), axis=1)
            score = score * (dim**-0.5 * softmax.LOG2E)
            score = jnp.where(block.is_seen(position, newest[r]), score, -jnp.inf)
            updated.append(_update(state, score, value))
        return tuple(updated)

    def attend_tile(j, carry):
        states, pages = carry
        stage, refill = lax.rem(j, tiling.stages), j + tiling.stages
        base = (kv.first + j) * tiling.block_kv
        plgpu.barrier_wait(smem.k_produced.at[stage])
        plgpu.barrier_wait(smem.v_produced.at[stage])
        states = lax.fori_loop(
            0, tiling.block_kv // _LANES, lambda i, x: attend_lanes(i, x, stage, base), states
        )
        plgpu.commit_smem()  # barrier: all threads have read the tiles that are refilled next

        @pl.when(refill < kv.count)
        def _():
            kv.fetch_keys(refill, stage, pages)
            kv.fetch_values(refill, stage, pages)

        return states, kv.find_pages(refill + 1)

    empty = softmax.State(
        softmax.full((_LANES, dim), 0.0, layout),
        softmax.full((_LANES,), -jnp.inf, layout.reduce(1)),
        softmax.full((_LANES,), 0.0, layout.reduce(1)),
    )
    carry = (empty,) * sizes.query_rows, kv.find_pages(tiling.stages)
    states, _ = lax.fori_loop(0, kv.count, attend_tile, carry)
    _store(block, states)


def _update(state, score, value):
    """Add one position to each softmax of a query: `score` `[_LANES]` and its `value`."""
    acc, m_i, l_i = state
    m_new = jnp.maximum(m_i, score)
    m_safe = softmax.finite(m_new)
    weight, rescale = jnp.exp2(score - m_safe), jnp.exp2(m_i - m_safe)
    acc = acc * lax.broadcast_in_dim(rescale, acc.shape, (0,))
    acc = acc + value * lax.broadcast_in_dim(weight, acc.shape, (0,))
    return softmax.State(acc, m_new, l_i * rescale + weight)


def _store(block, states):
    """Store the output of every query; that of an unsplit row goes through `q_rows` for gating."""
    q_rows = block.smem.q_rows
    for r, state in enumerate(states):
        output, lse = _merge_lanes(state)
        if block.sizes.tiling.splits == 1:
            access.store(q_rows.at[r], output)
        else:
            block.lse[r] = lse
            access.store(block.out.at[r], output)
    if block.sizes.tiling.splits == 1:
        plgpu.commit_smem()
        block.store_heads(q_rows)


def _merge_lanes(state):
    """Merge the softmaxes of a query's lanes into its output and its log-sum-exp."""
    acc, m_i, l_i = state
    m_max = softmax.finite(jnp.max(m_i))
    weight = jnp.exp2(m_i - m_max)
    l_sum = jnp.sum(l_i * weight)
    acc = jnp.sum(acc * lax.broadcast_in_dim(weight, acc.shape, (0,)), axis=0)
    lse = jnp.where(l_sum == 0, -jnp.inf, m_max + jnp.log(l_sum) * softmax.LOG2E)
    return acc / jnp.where(l_sum > 0, l_sum, 1.0), lse
