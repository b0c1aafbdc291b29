"""The block of `paged_attention_kernel` over float8_e4m3fn: half of bfloat16's bytes.

Tensor cores want 16 bits here. Tiles widened in shared memory would keep it busier than the memory
(about 7 bytes in and out for each of the pool), so keys and values are widened in registers, as
left operands: all is transposed, positions or channels down and queries across. Of those there are
few, and a product takes 8 or 16 of them as well as 64.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.attention.paged_block import lay_out
from jaxspec.pallas.gpu import access, tensor_cores
from jaxspec.pallas.paging.page_tiles import float8_tile

_ACROSS = plgpu.Layout.WGMMA.reduce(0)  # one value a query


def scratch(sizes, interpreted):
    """Shared memory and barriers of `float8`."""
    plan, dim = sizes.plan, sizes.pages.head_dim
    ring = float8_tile(plan.stages, plan.keys, dim)
    scratch = {
        "asked": plgpu.SMEM((sizes.height, dim), jnp.bfloat16),
        "tile": tensor_cores.tile(sizes.height, dim, dtype=jnp.float16),
        "weights": tensor_cores.tile(sizes.height, plan.keys, dtype=jnp.float16),
        "keys": ring,
        "values": ring,
        "sums": plgpu.SMEM((sizes.height,), jnp.float32),
        "arrived": sizes.barriers(),
    }
    if interpreted:
        shape = plan.keys, min(128, dim)
        scratch["left"] = [tensor_cores.tile(*x, dtype=jnp.float16) for x in (shape, shape[::-1])]
    return scratch


def float8(sizes, share, asked, keys, values, arrived, tile, weights, sums, left=(None, None)):
    """One block, in float16, which has every number of float8_e4m3fn; sums in float32.

    What was attended is float16 too, until the only share is put out, or several have merged.
    Barriers are all written out.
    """
    plan, dim = sizes.plan, sizes.pages.head_dim
    shape, some = (plan.keys, sizes.height), min(128, dim)
    parts = [pl.ds(column, some) for column in range(0, dim, some)]  # registers bound them
    place, query = (_iota(shape, i) for i in range(2))
    sees = share.sees(sizes, query)
    here, keys_here, values_here = arrived
    plgpu.barrier_wait(here)
    lay_out(sizes, asked, tile)

    def refill(which, tile, stage, pages):
        @plgpu.warp_map  # one warp alone: a copy a page is a fifth of all instructions
        def _(warp):
            first = (warp == 0) & (tile < share.count)
            pl.when(first)(lambda: share.fetch(which, tile, stage, pages))

    def step(j, carry):
        (acc, peak, total), pages = carry
        stage, base = lax.rem(j, plan.stages), (share.first + j) * plan.keys
        again = j + plan.stages
        plgpu.barrier_wait(keys_here.at[stage])
        scores: Any = softmax.full(shape, 0.0, plgpu.Layout.WGMMA)
        for columns in parts:
            key, queries = _keys(keys.at[stage, :, columns]), tile.at[:, columns]
            (scores,) = tensor_cores.accumulate(left[0], (scores, key, queries.transpose((1, 0))))
        scores = jnp.where(place <= sees - base, scores, -jnp.inf) * (dim**-0.5 * softmax.LOG2E)
        new = jnp.maximum(peak, scores.max(axis=0))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        weight = jnp.exp2(scores - lax.broadcast_in_dim(safe, shape, (1,)))
        fade = jnp.exp2(peak - safe)
        total = total * lax.broadcast_in_dim(fade, shape, (1,)) + weight
        weights.transpose((1, 0))[...] = weight.astype(jnp.float16)
        plgpu.commit_smem()  # all have read the keys too
        refill(0, again, stage, pages)
        plgpu.barrier_wait(values_here.at[stage])
        new_acc = []
        for part, columns in zip(acc, parts, strict=True):
            value = _values(values.at[stage, :, columns], share.length - base)
            part = part * lax.broadcast_in_dim(fade, part.shape, (1,))
            new_acc += tensor_cores.accumulate(left[1], (part, value, weights.transpose((1, 0))))
        plgpu.commit_smem()  # all have read the values
        refill(1, again, stage, pages)
        return (tuple(new_acc), new, total), share.find(again + 1)

    empty = (
        (softmax.full((some, sizes.height), 0.0, plgpu.Layout.WGMMA),) * len(parts),
        softmax.full((sizes.height,), -jnp.inf, _ACROSS),
        softmax.full(shape, 0.0, plgpu.Layout.WGMMA),
    )
    state, _ = lax.fori_loop(0, share.count, step, (empty, share.find(plan.stages)))
    _store(state, parts, tile, sums)
    _put_out(sizes, share, asked, tile, sums)


def _put_out(sizes, share, asked, tile, sums):
    """What was attended, of an only share by way of where the queries lay."""
    if sizes.plan.splits == 1:
        lay_out(sizes, tile, asked)
        share.put_out(sizes, asked)
        return
    out, sums_out = share.outputs
    plgpu.copy_smem_to_gmem(tile, out)
    plgpu.copy_smem_to_gmem(sums, sums_out)
    plgpu.wait_smem_to_gmem(0)


def _store(state, parts, tile, sums):
    """The result and log2 of the sum of its weights, to shared memory."""
    acc, peak, total = state
    total = total.sum(axis=0)
    total = jnp.where(total == 0, 1.0, total)
    for part, columns in zip(acc, parts, strict=True):
        part = part * lax.broadcast_in_dim(1 / total, part.shape, (1,))
        tile.at[:, columns].transpose((1, 0))[...] = part.astype(jnp.float16)
    sums[...] = peak + jnp.log(total) * softmax.LOG2E
    plgpu.commit_smem()


def _iota(shape, dimension):
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def _keys(tile):
    """`[positions, channels]` in float16, as the left operand of a product."""
    key = access.load(tile, plgpu.Layout.WGMMA_UPCAST_2X)
    return plgpu.layout_cast(key, plgpu.Layout.WGMMA).astype(jnp.float16)


def _values(tile, live):
    """`[channels, positions]`, the same; 0 from position `live` on.

    What others left there may not be finite, and 0 * NaN is NaN.
    """
    value = access.load(tile.transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED)
    value = plgpu.layout_cast(value.astype(jnp.float16), plgpu.Layout.WGMMA)

    def clear(value):
        return jnp.where(_iota(value.shape, 1) < live, value, jnp.zeros((), value.dtype))

    return lax.cond(live < value.shape[1], clear, lambda value: value, value)
