"""The blocks of `paged_attention_kernel`: bfloat16 on tensor cores, float32 by multiply-adds."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.attention.paged_block import lay_out
from jaxspec.pallas.gpu import tensor_cores

_AT_ONCE = 8  # positions in float32: of 4 warps, a half each


def scratch(sizes, interpreted):
    """Shared memory and barriers of `bfloat16`."""
    plan, dim = sizes.plan, sizes.pages.head_dim
    ring = tensor_cores.tile(plan.stages, plan.keys, dim)
    scratch = {
        "asked": plgpu.SMEM((sizes.height, dim), jnp.bfloat16),
        "tile": tensor_cores.tile(softmax.ROWS, dim),
        "keys": ring,
        "values": ring,
        "sums": plgpu.SMEM((softmax.ROWS,), jnp.float32),
        "arrived": sizes.barriers(),
    }
    if interpreted:
        scratch["weights"] = tensor_cores.tile(softmax.ROWS, plan.keys)
    return scratch


def bfloat16(sizes, share, asked, keys, values, arrived, tile, sums, weights=None):
    """One block in bfloat16: scores and sums by the tensor cores, in float32."""
    plan, dim = sizes.plan, sizes.pages.head_dim
    sees, place = (
        share.sees(sizes, softmax.iota(plan.keys, 0)),
        softmax.iota(plan.keys, 1),
    )
    here, keys_here, values_here = arrived
    plgpu.barrier_wait(here)
    lay_out(sizes, asked, tile)

    def step(j, carry):
        state, pages = carry
        stage, base = lax.rem(j, plan.stages), (share.first + j) * plan.keys
        again = j + plan.stages
        plgpu.barrier_wait(keys_here.at[stage])
        scores = tensor_cores.product(tile, keys.at[stage].transpose((1, 0)))
        pl.when(again < share.count)(lambda: share.fetch(0, again, stage, pages))
        scores = jnp.where(place <= sees - base, scores, -jnp.inf)
        weight, (acc, peak, total) = softmax.weigh(state, scores, dim**-0.5 * softmax.LOG2E)
        plgpu.barrier_wait(values_here.at[stage])
        pl.when(base + plan.keys > share.length)(
            lambda: tensor_cores.clear(values.at[stage], 0, share.length - base)
        )
        (acc,) = tensor_cores.accumulate(weights, (acc, weight, values.at[stage]))
        pl.when(again < share.count)(lambda: share.fetch(1, again, stage, pages))
        return (acc, peak, total), share.find(again + 1)

    carry = softmax.empty(dim), share.find(plan.stages)
    state, _ = lax.fori_loop(0, share.count, step, carry)
    _, peak, total = state
    tile[...] = softmax.result(state).astype(tile.dtype)
    if plan.splits == 1:
        plgpu.commit_smem()
        lay_out(sizes, tile, asked)
        share.put_out(sizes, asked)
        return
    sums[...] = peak + jnp.log(jnp.where(total == 0, 1.0, total)) * softmax.LOG2E
    plgpu.commit_smem()
    out, sums_out = share.outputs
    plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, sizes.height)], out)
    plgpu.copy_smem_to_gmem(sums, sums_out)
    plgpu.wait_smem_to_gmem(0)
