"""Products on tensor cores by one warpgroup (wgmma).

Mosaic's interpreter takes no operand in registers, and cannot add a product to an accumulator that
has a value. Its kernels pass `spare`, a tile in shared memory as large as the operand, which stands
in; on a GPU `spare` is None.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # 16-bit elements in one row of a swizzled tile, which has 128 bytes


def tile(*shape, dtype=jnp.bfloat16):
    """Shared memory in 128-byte swizzled tiles.

    wgmma reads them in 16 bits; in 32 bits the swizzle avoids bank conflicts between rows.
    """
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


def operand(x, spare) -> Any:
    """The operand of wgmma for `x` in registers: `x` itself, or a copy of it in `spare`."""
    if spare is None:
        return x
    part = spare.at[:, pl.ds(0, x.shape[1])]
    part[...] = x
    plgpu.commit_smem()
    return part


def product(a, b) -> Any:
    """`a @ b` in float32; both are in shared memory."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def accumulate(spare, *sums) -> Any:
    """`onto + a @ b` for each `(onto, a, b)` of `sums`, in flight together; `a` is in registers."""
    if spare is not None:
        return [onto + product(operand(a, spare), b) for onto, a, b in sums]

    def run(accs):
        for acc, (_, a, b) in zip(accs, sums, strict=True):
            plgpu.wgmma(acc, a, b)

    return pl.run_state(run)([plgpu.WGMMAAccumulatorRef.init(onto) for onto, _, _ in sums])


def clear(rows, low, high, drafts=None):
    """Set rows before `low` and from `high` on to zero: they may hold NaN, and 0 * NaN is NaN.

    From row `drafts` on what is not finite becomes zero as well.
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
