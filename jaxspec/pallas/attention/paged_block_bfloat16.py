"""Block of paged attention in bfloat16: matmuls on tensor cores, sums in float32."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.attention.paged_block import Block, BlockSizes, copy_rows
from jaxspec.pallas.gpu import tensor_cores

LSE_ROWS = softmax.ROWS  # rows per query tile in the log-sum-exp of a split


class Smem(NamedTuple):
    """Barriers and shared memory of a block, in allocation order."""

    q_produced: Any
    k_produced: Any
    v_produced: Any
    q_rows: Any  # [query_rows, head_dim], row-major, as copied
    keys: Any  # [stages, block_kv, head_dim]
    lse: Any  # [ROWS]
    q_tile: Any  # [ROWS, head_dim], swizzled for tensor cores; finally the output
    values: Any  # like `keys`
    weights: Any  # substitute for the register operand under the interpreter, else None


def smem(sizes: BlockSizes, interpreted: bool) -> Smem:
    tiling, dim = sizes.tiling, sizes.pages.head_dim
    ring = tensor_cores.tile(tiling.stages, tiling.block_kv, dim)
    return Smem(
        q_produced=sizes.query_barrier(),
        k_produced=sizes.ring_barriers(),
        v_produced=sizes.ring_barriers(),
        q_rows=plgpu.SMEM((sizes.query_rows, dim), jnp.bfloat16),
        keys=ring,
        lse=plgpu.SMEM((softmax.ROWS,), jnp.float32),
        q_tile=tensor_cores.tile(softmax.ROWS, dim),
        values=ring,
        weights=tensor_cores.tile(softmax.ROWS, tiling.block_kv) if interpreted else None,
    )


def attend(block: Block):
    sizes, smem, kv, length = block.sizes, block.smem, block.kv, block.row.length
    tiling, dim = sizes.tiling, sizes.pages.head_dim
    newest = block.newest_position(softmax.tile_iota(tiling.block_kv, 0))
    position = softmax.tile_iota(tiling.block_kv, 1)
    plgpu.barrier_wait(smem.q_produced)
    copy_rows(sizes, smem.q_rows, smem.q_tile)

    def attend_tile(j, carry):
        state, pages = carry
        stage, base = lax.rem(j, tiling.stages), (kv.first + j) * tiling.block_kv
        refill = j + tiling.stages  # next tile in this stage
        plgpu.barrier_wait(smem.k_produced.at[stage])
        scores = tensor_cores.product(smem.q_tile, smem.keys.at[stage].transpose((1, 0)))
        pl.when(refill < kv.count)(lambda: kv.fetch_keys(refill, stage, pages))
        scores = jnp.where(block.is_seen(position, newest - base), scores, -jnp.inf)
        weights, state = softmax.update(state, scores, dim**-0.5 * softmax.LOG2E)
        plgpu.barrier_wait(smem.v_produced.at[stage])
        values = smem.values.at[stage]
        pl.when(base + tiling.block_kv > block.row.start + 1)(
            lambda: tensor_cores.clear(values, 0, length - base, block.row.start + 1 - base)
        )
        (acc,) = tensor_cores.accumulate(smem.weights, (state.acc, weights, values))
        pl.when(refill < kv.count)(lambda: kv.fetch_values(refill, stage, pages))
        return state._replace(acc=acc), kv.find_pages(refill + 1)

    carry = softmax.empty(dim), kv.find_pages(tiling.stages)
    state, _ = lax.fori_loop(0, kv.count, attend_tile, carry)
    smem.q_tile[...] = softmax.output(state).astype(smem.q_tile.dtype)
    if tiling.splits == 1:
        plgpu.commit_smem()
        copy_rows(sizes, smem.q_tile, smem.q_rows)
        block.store_heads(smem.q_rows)
    else:
        smem.lse[...] = softmax.lse(state)
        plgpu.commit_smem()
        block.copy_split(smem.q_tile.at[pl.ds(0, sizes.query_rows)], smem.lse)
