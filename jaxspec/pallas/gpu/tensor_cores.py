"""Matmuls on tensor cores by one warpgroup (wgmma).

Mosaic's interpreter accepts no wgmma operand in registers, and cannot add a matmul to an
accumulator that already has a value. So interpreted kernels pass `spare`, a tile in shared memory
as large as the operand; on a GPU `spare` is None.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # 16-bit elements in one 128-byte row of a swizzled tile


def tile(*shape, dtype=jnp.bfloat16):
    """Return shared memory in 128-byte swizzled tiles.

    wgmma reads 8-bit and 16-bit operands in this format; with 32 bits the swizzle avoids bank
    conflicts between rows.
    """
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


def operand(x, spare) -> Any:
    """Return the wgmma operand for `x` in registers: `x` itself, or a copy of it in `spare`."""
    if spare is None:
        return x
    part = spare.at[:, pl.ds(0, x.shape[1])]
    part[...] = x
    plgpu.commit_smem()
    return part


def product(a, b) -> Any:
    """Return `a @ b` in float32; both operands are in shared memory."""
    return sum_of_products([(a, b)], is_interpreted=False)


def sum_of_products(pairs, *, is_interpreted) -> Any:
    """Return the sum of `a @ b` for all `pairs`, in float32; the operands are in shared memory."""
    if is_interpreted:
        return sum(product(a, b) for a, b in pairs)

    def run(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    (a, b), *_ = pairs
    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def summed(spare, rows, operands) -> Any:
    """Return the sum of `a() @ b` for each `(a, b)` of `operands`; `a` returns `rows` in registers.

    It is called after the matmuls before it were started.
    """
    if spare is not None:
        return sum(product(operand(a(), spare), b) for a, b in operands)

    def run(acc):
        for a, b in operands:
            plgpu.wgmma(acc, a(), b)
        return acc[...]

    shape = rows, operands[0][1].shape[1]
    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def accumulate(spare, *sums) -> Any:
    """Return `onto + a @ b` for each `(onto, a, b)` of `sums`; each `a` is in registers.

    The matmuls are in flight together.
    """
    if spare is not None:
        return [onto + product(operand(a, spare), b) for onto, a, b in sums]

    def run(accs):
        for acc, (_, a, b) in zip(accs, sums, strict=True):
            plgpu.wgmma(acc, a, b)

    return pl.run_state(run)([plgpu.WGMMAAccumulatorRef.init(onto) for onto, _, _ in sums])


def clear(rows, low, high, drafts=None):
    """Zero rows outside `low <= row < high`: they may hold NaN, and 0 * NaN is NaN.

    From row `drafts` on, non-finite values are zeroed too.
    """
    shape = (rows.shape[0], 64)
    place = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    real = (low <= place) & (place < high)
    for column in range(0, rows.shape[1], 64):
        part = rows.at[:, pl.ds(column, 64)]
        value, kept = part[...], real
        if drafts is not None:
            kept &= (place < drafts) | (jnp.abs(value.astype(jnp.float32)) < jnp.inf)
        part[...] = jnp.where(kept, value, jnp.zeros((), rows.dtype))
    plgpu.commit_smem()
