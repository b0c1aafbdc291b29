"""Kernel of `norm_matmul` for one or two rows (Pallas, Mosaic GPU).

Every block normalizes all rows while its share of the weight is being copied. The rows are few, and
all blocks but the first read them from the L2 cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.matmul.skinny_gemm import MAX_ROWS
from jaxspec.pallas.matmul.skinny_gemm_kernel import SkinnyTiling, WeightStream, put_out

_NORM_COLUMNS = 1024  # normalized at a time; more would not fit into a thread's registers


@functools.partial(jax.jit, static_argnames="interpret")
def norm_matmul_kernel(stream, pending, norm, weight, *, interpret=None):
    """Run `norm_matmul` for one or two rows; `weight` is the array of a `Dense`."""
    (tokens, features), outer = stream.shape, weight.shape[1]
    blocks = pl.cdiv(outer, BLOCK_N)
    reserved = 2 * (MAX_ROWS + 1) * features + 2048
    tiling = SkinnyTiling.of(weight, features, blocks, reserved)
    scratch = tiling.scratch()
    scratch["rows"] = plgpu.SMEM((MAX_ROWS + 1, features), stream.dtype)
    scratch["out"] = plgpu.SMEM((MAX_ROWS, BLOCK_N), stream.dtype)
    y = jax.ShapeDtypeStruct((tokens, outer), stream.dtype)
    total = jax.ShapeDtypeStruct(stream.shape, stream.dtype)

    def body(stream, scale, weight, *refs, **scratch):
        added, y, total = (None, *refs, None) if pending is None else refs
        _block(tiling, norm, _Refs(stream, scale, weight, added, y, total, **scratch))

    kernel = plgpu.kernel(
        body,
        kernel_name="norm_matmul",
        out_type=(y,) if pending is None else (y, total),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    if pending is None:
        (product,) = kernel(stream, norm.weight, weight)
        return stream, product
    product, sum_ = kernel(stream, norm.weight, weight, pending)
    return sum_, product


class _Refs(NamedTuple):
    """References of a block; `pending` and `total` are None if nothing is added."""

    stream: Any
    scale: Any  # the norm's weight
    weight: Any
    pending: Any
    y: Any
    total: Any
    ring: Any  # shared memory from here on
    filled: Any
    rows: Any  # the sums, and the norm's weight as the last row
    tile: Any  # the normalized rows, tiled for wgmma
    out: Any


def _block(tiling, norm, refs):
    """Compute a block's columns of `y`; the first block also writes the sum."""
    block = lax.axis_index("block")
    column = block * BLOCK_N
    weights = WeightStream(refs.weight, 0, column, refs.ring, refs.filled)
    tiling.start(weights)

    # Load the norm's weight before the first wait, too.
    scale = access.load(refs.scale, layouts.vectors(refs.stream.shape[1] // device.THREADS))
    _store_totals(refs, block)
    access.store(refs.rows.at[MAX_ROWS], scale)
    plgpu.commit_smem()
    _norm(tiling.layout(), norm, refs)
    plgpu.commit_smem()

    product = tiling.run(refs.tile, weights)
    put_out(product, refs.out, refs.y.at[:, pl.ds(column, BLOCK_N)])


def _store_totals(refs, block):
    """Store each row's sum in `rows`, and zeros in the rows past the last of the stream.

    The first block also stores the sums in `total`.
    """
    count, features = refs.stream.shape
    for row, sum_ in enumerate(_totals(refs.stream, refs.pending)):
        access.store(refs.rows.at[row], sum_)
        if refs.total is not None:
            pl.when(block == 0)(lambda to=refs.total.at[row], x=sum_: access.store(to, x))
    layout = layouts.vectors(features // device.THREADS)
    zeros = plgpu.layout_cast(jnp.zeros(features, refs.stream.dtype), layout)
    for row in range(count, MAX_ROWS):
        access.store(refs.rows.at[row], zeros)


def _totals(stream, pending):
    """Return each row's sum in registers; everything is loaded before anything is stored."""
    rows = range(stream.shape[0])
    layout = plgpu.Layout.WG_STRIDED(stream.shape[1:], vec_size=8)
    load = functools.partial(access.load, layout=layout)
    old = [load(stream.at[row]) for row in rows]
    if pending is None:
        return old
    if len(pending.shape) == 2:
        new = [load(pending.at[row]) for row in rows]
    else:
        sums = [load(pending.at[0, row]) for row in rows]
        for part in range(1, pending.shape[0]):
            more = [load(pending.at[part, row]) for row in rows]
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        new = [a.astype(stream.dtype) for a in sums]
    wide = [[a.astype(jnp.float32) for a in both] for both in zip(old, new, strict=True)]
    return [(a + b).astype(stream.dtype) for a, b in wide]


def _norm(layout, norm, refs):
    """Normalize `rows`, each in one warp, and store them in `tile`.

    The columns are read twice: once for the mean square, and once for the result.
    """
    tokens, features = pl.ds(0, MAX_ROWS), refs.rows.shape[1]
    parts = [pl.ds(column, _NORM_COLUMNS) for column in range(0, features, _NORM_COLUMNS)]
    square = 0.0
    for part in parts:
        x = access.load(refs.rows.at[tokens, part], layout).astype(jnp.float32)
        square = square + jnp.sum(x * x, axis=1)
    root = lax.rsqrt(square * (1 / features) + norm.eps)
    if len(parts) > 1:
        plgpu.commit_smem()  # otherwise the compiler keeps the first reads in registers
    for part in parts:
        x = access.load(refs.rows.at[tokens, part], layout).astype(jnp.float32)
        scale = access.load(refs.rows.at[MAX_ROWS, part], layout.reduce(0)).astype(jnp.float32)
        scale = scale + 1.0 if norm.zero_centred else scale
        normed = x * lax.broadcast_in_dim(root, x.shape, (0,))
        normed = normed * lax.broadcast_in_dim(scale, x.shape, (1,))
        access.store(refs.tile.at[:, part], normed.astype(refs.tile.dtype))
