"""A block of paged attention in float32: products on the CUDA cores."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.attention.paged_block_bfloat16 import _AT_ONCE
from jaxspec.pallas.gpu import access, layouts


def scratch32(sizes):
    """Shared memory and barriers of `float32`."""
    ring = plgpu.SMEM((sizes.plan.stages, sizes.plan.keys, sizes.pages.head_dim), jnp.float32)
    asked = plgpu.SMEM((sizes.height, sizes.pages.head_dim), jnp.float32)
    return {"asked": asked, "keys": ring, "values": ring, "arrived": sizes.barriers()}


def float32(sizes, share, asked, keys, values, arrived):
    """One block in float32, which tensor cores would round to 10 bits.

    Positions are taken `_AT_ONCE`, each by 16 lanes. A position's place among them keeps a softmax
    of its own for every query, so that nothing crosses warps before the end.
    """
    plan, dim = sizes.plan, sizes.pages.head_dim
    layout = layouts.row_layout(dim, 4)
    here, keys_here, values_here = arrived
    within = plgpu.broadcasted_iota(jnp.int32, (_AT_ONCE,), 0, layout=layout.reduce(1))
    sees = [share.sees(sizes, jnp.int32(r)) for r in range(sizes.height)]
    plgpu.barrier_wait(here)

    def some(i, carry, stage, base):
        rows = pl.ds(i * _AT_ONCE, _AT_ONCE)
        key, value = (access.load(ring.at[stage, rows], layout) for ring in (keys, values))
        place = within + (base + i * _AT_ONCE)
        # What others left beyond the row may not be finite, and 0 * NaN is NaN.
        value = jnp.where(lax.broadcast_in_dim(place, value.shape, (0,)) < share.length, value, 0.0)
        new = []
        for r, state in enumerate(carry):
            query = access.load(asked.at[r], layout.reduce(0))
            score = jnp.sum(key * lax.broadcast_in_dim(query, key.shape, (1,)), axis=1)
            score = jnp.where(place <= sees[r], score * (dim**-0.5 * softmax.LOG2E), -jnp.inf)
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
        softmax.full((_AT_ONCE, dim), 0.0, layout),
        softmax.full((_AT_ONCE,), -jnp.inf, layout.reduce(1)),
        softmax.full((_AT_ONCE,), 0.0, layout.reduce(1)),
    )
    states, _ = lax.fori_loop(
        0, share.count, step, ((empty,) * sizes.height, share.find(plan.stages))
    )
    _put_out32(sizes, share, asked, states)


def _put_out32(sizes, share, asked, states):
    """What each query attended, of an only share by way of where the queries lay."""
    for r, state in enumerate(states):
        result, log_sum = _over_places(*state)
        if sizes.plan.splits == 1:
            access.store(asked.at[r], result)
        else:
            out, sums_out = share.outputs
            sums_out[r] = log_sum
            access.store(out.at[r], result)
    if sizes.plan.splits == 1:
        plgpu.commit_smem()
        share.put_out(sizes, asked)


def _over_places(acc, peak, total):
    """One softmax from those of the places: the result, and log2 of the sum of its weights."""
    most = jnp.max(peak)
    most = jnp.where(most == -jnp.inf, 0.0, most)
    weight = jnp.exp2(peak - most)
    total = jnp.sum(total * weight)
    acc = jnp.sum(acc * lax.broadcast_in_dim(weight, acc.shape, (0,)), axis=0)
    log_sum = jnp.where(total == 0, -jnp.inf, most + jnp.log(total) * softmax.LOG2E)
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
