"""The blocks of `paged_attention_kernel`: bfloat16 on tensor cores, float32 by multiply-adds."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import mosaic

ROWS = 64  # of a tile of queries, what wgmma takes
_LOG2E = math.log2(math.e)
_AT_ONCE = 8  # positions in float32: of 4 warps, a half each


def query_rows(dtype, head_dim):
    """Rows of a tile of queries; in float32 their sums must fit into the registers."""
    if dtype == jnp.bfloat16:
        return ROWS
    return 8 if head_dim == 256 else 16


def scratch(sizes, interpreted):
    """Shared memory and barriers of `bfloat16`."""
    plan, dim = sizes.plan, sizes.head_dim
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((plan.stages, plan.keys, dim), jnp.bfloat16, transforms=swizzled)
    scratch = {
        "tile": plgpu.SMEM((ROWS, dim), jnp.bfloat16, transforms=swizzled),
        "keys": ring,
        "values": ring,
        "sums": plgpu.SMEM((ROWS,), jnp.float32),
        "arrived": sizes.barriers(),
    }
    if interpreted:
        scratch["weights"] = plgpu.SMEM((ROWS, plan.keys), jnp.bfloat16, transforms=swizzled)
    return scratch


def bfloat16(sizes, share, out, sums_out, tile, keys, values, arrived, sums, weights=None):
    """One block in bfloat16: scores and sums by the tensor cores, in float32."""
    plan, dim = sizes.plan, sizes.head_dim
    token = lax.div(_iota(plan.keys, 0) + share.part * ROWS, jnp.int32(sizes.group))
    sees = jnp.where(token < share.tokens, share.start + token, -1)  # newest position a row sees
    place = _iota(plan.keys, 1)
    here, keys_here, values_here = arrived
    plgpu.barrier_wait(here)

    def step(j, carry):
        acc, peak, total, pages = carry
        stage, base = lax.rem(j, plan.stages), (share.first + j) * plan.keys
        again = j + plan.stages
        plgpu.barrier_wait(keys_here.at[stage])
        scores = _product(tile, keys.at[stage].transpose((1, 0)))
        pl.when(again < share.count)(lambda: share.fetch(0, again, stage, pages))
        scores = jnp.where(place <= sees - base, scores * (dim**-0.5 * _LOG2E), -jnp.inf)
        new = jnp.maximum(peak, scores.max(axis=1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        weight = jnp.exp2(scores - lax.broadcast_in_dim(safe, scores.shape, (0,)))
        fade = jnp.exp2(peak - safe)
        total = total * fade + weight.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, (0,))
        plgpu.barrier_wait(values_here.at[stage])
        pl.when(base + plan.keys > share.length)(
            lambda: _clear(values.at[stage], share.length - base)
        )
        acc = _accumulate(acc, weight.astype(tile.dtype), values.at[stage], weights)
        pl.when(again < share.count)(lambda: share.fetch(1, again, stage, pages))
        return acc, new, total, share.find(again + 1)

    column = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        _full((ROWS, dim), 0.0, plgpu.Layout.WGMMA),
        _full((ROWS,), -jnp.inf, column),
        _full((ROWS,), 0.0, column),
        share.find(plan.stages),
    )
    acc, peak, total, _ = lax.fori_loop(0, share.count, step, carry)
    some = jnp.where(total > 0, total, 1.0)
    tile[...] = (acc / lax.broadcast_in_dim(some, acc.shape, (0,))).astype(tile.dtype)
    sums[...] = peak + jnp.log(some) * _LOG2E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, sizes.height)], out)
    plgpu.copy_smem_to_gmem(sums, sums_out)
    plgpu.wait_smem_to_gmem(0)


def _product(a, b):
    """`a @ b` in float32."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _accumulate(acc, weight, values, weights):
    """`acc + weight @ values`; `weights` is shared memory where the interpreter runs.

    It knows neither wgmma on a given accumulator nor an operand in registers.
    """
    if weights is not None:
        weights[...] = weight
        plgpu.commit_smem()
        return acc + _product(weights, values)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weight, values))(
        plgpu.WGMMAAccumulatorRef.init(acc)
    )


def _clear(values, live):
    """Zero from row `live` on: what others left there may not be finite, and 0 * NaN is NaN."""
    place = plgpu.broadcasted_iota(jnp.int32, (values.shape[0], 64), 0, layout=plgpu.Layout.WGMMA)
    for column in range(0, values.shape[1], 64):
        part = values.at[:, pl.ds(column, 64)]
        part[...] = jnp.where(place < live, part[...], jnp.zeros((), values.dtype))
    plgpu.commit_smem()


def _iota(keys, dimension):
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), dimension, layout=plgpu.Layout.WGMMA)


def _full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def scratch32(sizes):
    """Shared memory and barriers of `float32`."""
    ring = plgpu.SMEM((sizes.plan.stages, sizes.plan.keys, sizes.head_dim), jnp.float32)
    tile = plgpu.SMEM((sizes.height, sizes.head_dim), jnp.float32)
    return {"tile": tile, "keys": ring, "values": ring, "arrived": sizes.barriers()}


def float32(sizes, share, out, sums_out, tile, keys, values, arrived):
    """One block in float32, which tensor cores would round to 10 bits.

    Positions are taken `_AT_ONCE`, each by 16 lanes. A position's place among them keeps a softmax
    of its own for every query, so that nothing crosses warps before the end.
    """
    plan, dim = sizes.plan, sizes.head_dim
    layout = mosaic.row_layout(plgpu, dim, 4)
    here, keys_here, values_here = arrived
    within = plgpu.broadcasted_iota(jnp.int32, (_AT_ONCE,), 0, layout=layout.reduce(1))
    tokens = [
        lax.div(share.part * sizes.height + r, jnp.int32(sizes.group)) for r in range(sizes.height)
    ]
    sees = [jnp.where(token < share.tokens, share.start + token, -1) for token in tokens]
    plgpu.barrier_wait(here)

    def some(i, carry, stage, base):
        rows = pl.ds(i * _AT_ONCE, _AT_ONCE)
        key, value = (mosaic.load(plgpu, ring.at[stage, rows], layout) for ring in (keys, values))
        place = within + (base + i * _AT_ONCE)
        # What others left beyond the row may not be finite, and 0 * NaN is NaN.
        value = jnp.where(lax.broadcast_in_dim(place, value.shape, (0,)) < share.length, value, 0.0)
        new = []
        for r, state in enumerate(carry):
            query = mosaic.load(plgpu, tile.at[r], layout.reduce(0))
            score = jnp.sum(key * lax.broadcast_in_dim(query, key.shape, (1,)), axis=1)
            score = jnp.where(place <= sees[r], score * (dim**-0.5 * _LOG2E), -jnp.inf)
            new.append(_softmax_add(state, score, value))
        return tuple(new)

    def step(j, carry):
        states, pages = carry
        stage, again = lax.rem(j, plan.stages), j + plan.stages
        base = (share.first + j) * plan.keys
        plgpu.barrier_wait(keys_here.at[stage])
        plgpu.barrier_wait(values_here.at[stage])
        states = lax.fori_loop(
            0, plan.keys // _AT_ONCE, lambda i, x: some(i, x, stage, base), states
        )

        plgpu.commit_smem()  # all threads have read the tiles that the next ones overwrite

        @pl.when(again < share.count)
        def _():
            share.fetch(0, again, stage, pages)
            share.fetch(1, again, stage, pages)

        return states, share.find(again + 1)

    empty = (
        _full((_AT_ONCE, dim), 0.0, layout),
        _full((_AT_ONCE,), -jnp.inf, layout.reduce(1)),
        _full((_AT_ONCE,), 0.0, layout.reduce(1)),
    )
    states, _ = lax.fori_loop(
        0, share.count, step, ((empty,) * sizes.height, share.find(plan.stages))
    )
    for r, state in enumerate(states):
        result, sums_out[r] = _over_places(*state)
        mosaic.store(plgpu, out.at[r], result)


def _over_places(acc, peak, total):
    """One softmax from those of the places: the result, and log2 of the sum of its weights."""
    most = jnp.max(peak)
    most = jnp.where(most == -jnp.inf, 0.0, most)
    weight = jnp.exp2(peak - most)
    total = jnp.sum(total * weight)
    acc = jnp.sum(acc * lax.broadcast_in_dim(weight, acc.shape, (0,)), axis=0)
    log_sum = jnp.where(total == 0, -jnp.inf, most + jnp.log(total) * _LOG2E)
    return acc / jnp.where(total > 0, total, 1.0), log_sum


def _softmax_add(state, score, value):
    """The sums of a softmax with one more position each: `score` [n], `value` [n, dim]."""
    acc, peak, total = state
    new = jnp.maximum(peak, score)
    safe = jnp.where(new == -jnp.inf, 0.0, new)
    weight, fade = jnp.exp2(score - safe), jnp.exp2(peak - safe)
    acc = acc * lax.broadcast_in_dim(fade, acc.shape, (0,))
    acc = acc + value * lax.broadcast_in_dim(weight, acc.shape, (0,))
    return acc, new, total * fade + weight
