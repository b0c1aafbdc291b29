"""`norm_matmul` on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

Every block norms all rows anew, while its share of the weight is under way: they are few, and come
from the L2 cache.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.matmul.few_rows import MOST_ROWS
from jaxspec.pallas.matmul.few_rows_kernel import Product, put_out
from jaxspec.pallas.matmul.products import COLUMNS


@functools.partial(jax.jit, static_argnames=("eps", "zero_centred", "interpret"))
def norm_matmul_kernel(x, delta, norm, weight, *, eps, zero_centred, interpret=None):
    """`norm_matmul` of one or two rows, with the norm's weight before the product's.

    `interpret`: parameters of Mosaic's interpreter.
    """
    (tokens, features), outer = x.shape, weight.shape[1]
    # Two blocks on one multiprocessor would have little room each for what is under way.
    pieces = 1 if pl.cdiv(outer, COLUMNS) <= device.MULTIPROCESSORS else 2
    blocks = pl.cdiv(outer, pieces * COLUMNS)
    beside = 2 * (MOST_ROWS + 1) * features + 2048
    product = Product.of(weight, features, blocks, beside, pieces)
    scratch = product.scratch()
    scratch["rows"] = plgpu.SMEM((MOST_ROWS + 1, features), x.dtype)
    scratch["out"] = plgpu.SMEM((MOST_ROWS, COLUMNS), x.dtype)
    y = jax.ShapeDtypeStruct((tokens, outer), x.dtype)
    total = () if delta is None else (jax.ShapeDtypeStruct(x.shape, x.dtype),)
    out = plgpu.kernel(
        functools.partial(_block, product, eps, zero_centred),
        kernel_name="norm_matmul",
        out_type=(y, *total),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        # Safe without barriers but its own, and a row's sum is one warp's.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, norm, weight, *(() if delta is None else (delta,)))
    return (x, *out) if delta is None else out[::-1]


def _block(
    product, eps, zero_centred, x, norm, weight, *refs,
    ring, tile, arrived, rows, out,
):  # fmt: skip
    """A block's columns of `y`; the first also writes the sum."""
    delta, y, total = (None, *refs, None) if len(refs) == 1 else refs
    block = lax.axis_index("block")
    column = block * product.pieces * COLUMNS
    source = weight, 0, column, ring, arrived
    product.start(*source)

    # The norm's weight too is loaded before what others wait for.
    layout = layouts.vectors(x.shape[1] // device.THREADS)
    scale = access.load(norm, layout)
    _put_totals(x, delta, rows, None if total is None else (block == 0, total))
    access.store(rows.at[MOST_ROWS], scale)
    plgpu.commit_smem()
    _norm(product.layout(), rows, eps, zero_centred, tile)
    plgpu.commit_smem()

    for piece, sums in enumerate(product.run(tile, *source)):
        put_out(sums, out, y.at[:, pl.ds(column + piece * COLUMNS, COLUMNS)])


def _put_totals(x, delta, rows, written):
    """What `x` and `delta` make in `rows`, zeros in those that `x` has not.

    `written`: where else, and whether.
    """
    count, features = x.shape
    for row, sum_ in enumerate(_totals(x, delta)):
        access.store(rows.at[row], sum_)
        if written is not None:
            here, total = written
            pl.when(here)(lambda at=total.at[row], x=sum_: access.store(at, x))
    layout = layouts.vectors(features // device.THREADS)
    nothing = plgpu.layout_cast(jnp.zeros(features, x.dtype), layout)
    for row in range(count, MOST_ROWS):
        access.store(rows.at[row], nothing)


def _totals(x, delta):
    """What `x` and `delta` make in each row; all is loaded before anything is stored."""
    rows = range(x.shape[0])
    layout = plgpu.Layout.WG_STRIDED(x.shape[1:], vec_size=8)
    load = functools.partial(access.load, layout=layout)
    old = [load(x.at[row]) for row in rows]
    if delta is None:
        return old
    if len(delta.shape) == 2:
        new = [load(delta.at[row]) for row in rows]
    else:
        sums = [load(delta.at[0, row]) for row in rows]
        for part in range(1, delta.shape[0]):
            more = [load(delta.at[part, row]) for row in rows]
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        new = [a.astype(x.dtype) for a in sums]
    wide = [[a.astype(jnp.float32) for a in both] for both in zip(old, new, strict=True)]
    return [(a + b).astype(x.dtype) for a, b in wide]


def _norm(layout, rows, eps, zero_centred, tile):
    """`rms_norm` of `rows`, each of them in one warp, into what tensor cores read.

    The last of `rows` is the weight. 1024 columns at a time, twice: more would not fit into a
    thread's registers.
    """
    tokens, features = pl.ds(0, MOST_ROWS), rows.shape[1]
    parts = [pl.ds(column, 1024) for column in range(0, features, 1024)]
    square = 0.0
    for part in parts:
        x = access.load(rows.at[tokens, part], layout).astype(jnp.float32)
        square = square + jnp.sum(x * x, axis=1)
    root = lax.rsqrt(square * (1 / features) + eps)
    if len(parts) > 1:
        plgpu.commit_smem()  # or the compiler would keep what is loaded again below
    for part in parts:
        x = access.load(rows.at[tokens, part], layout).astype(jnp.float32)
        scale = access.load(rows.at[MOST_ROWS, part], layout.reduce(0)).astype(jnp.float32)
        scale = scale + 1.0 if zero_centred else scale
        normed = x * lax.broadcast_in_dim(root, x.shape, (0,))
        normed = normed * lax.broadcast_in_dim(scale, x.shape, (1,))
        access.store(tile.at[:, part], normed.astype(tile.dtype))
