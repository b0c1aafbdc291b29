"""`split_matmul`, `gated_matmul` and `gated_norm_matmul` on a Hopper GPU (Pallas, Mosaic GPU).

And the product that is not cut, `matmul_kernel`. Import only where kernels run.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.matmul.few_rows import GATES, MOST_ROWS, parts_of
from jaxspec.pallas.matmul.few_rows_kernel import Product, put_out
from jaxspec.pallas.matmul.products import COLUMNS
from jaxspec.pallas.norm import gated_norm_block


@functools.partial(jax.jit, static_argnames="interpret")
def split_matmul_kernel(x, weight, *, interpret=None):
    """`split_matmul`; `interpret`: parameters of Mosaic's interpreter."""
    parts = parts_of(*weight.shape, unit=64)
    product, launch = _plan(x.shape[0], weight, parts, jnp.float32, interpret)
    block = functools.partial(_block, product)
    return launch("split_matmul", block, {"landed": plgpu.Barrier()})(weight, x)


@functools.partial(jax.jit, static_argnames="interpret")
def matmul_kernel(x, weight, *, interpret=None):
    """`x @ weight` in their dtype, of as few rows and with as few columns as `few_rows` says.

    `interpret`: parameters of Mosaic's interpreter.
    """
    product, launch = _plan(x.shape[0], weight, 1, x.dtype, interpret)
    block = functools.partial(_block, product)
    (y,) = launch("few_rows_matmul", block, {"landed": plgpu.Barrier()})(weight, x)
    return y


def _plan(tokens, weight, parts, dtype, interpret, copies=0):
    """What a block multiplies, and how a kernel of such blocks is made of its body and scratch.

    `dtype`: of what they put out; `copies`: of a block's rows that are in its scratch.
    """
    inner, outer = weight.shape
    columns = pl.cdiv(outer, COLUMNS)
    beside = copies * 2 * MOST_ROWS * (inner // parts) + 4096
    product = Product.of(weight, inner // parts, parts * columns, beside=beside)

    def launch(name, body, scratch):
        return plgpu.kernel(
            body,
            kernel_name=name,
            out_type=jax.ShapeDtypeStruct((parts, tokens, outer), dtype),
            scratch_types=product.scratch()
            | {"out": plgpu.SMEM((MOST_ROWS, COLUMNS), dtype)}
            | scratch,
            grid=(columns, parts),
            grid_names=("column", "part"),
            # Safe without barriers but its own, and a head's sum is one warp's.
            compiler_params=plgpu.CompilerParams(
                unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
            **({} if interpret is None else {"interpret": interpret}),
        )

    return product, launch


def _source(product, weight, ring, arrived):
    """The part of the weight that is this block's, and where it arrives."""
    column, part = lax.axis_index("column") * COLUMNS, lax.axis_index("part")
    return weight, part * product.inner, column, ring, arrived


def _finish(product, tile, source, out, y):
    """Multiply `tile` and write what comes of it."""
    columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
    (sums,) = product.run(tile, *source)
    put_out(sums, out, y.at[lax.axis_index("part"), :, columns])


def _finish_rows(product, rows, tile, *finish):
    """What `_finish` does, of rows that lie side by side."""
    plgpu.commit_smem()
    access.store(tile, access.load(rows.reshape(*tile.shape), product.layout()))
    plgpu.commit_smem()
    _finish(product, tile, *finish)


def _block(product, weight, x, y, *, ring, tile, arrived, landed, out):
    """The tokens come as they lie; of rows that there are not come zeros."""
    source, part = _source(product, weight, ring, arrived), lax.axis_index("part")
    # A traced 0: jax 0.12 refuses rows of which it sees that the array lacks them.
    rows = pl.ds(part * 0, MOST_ROWS)
    here = pl.ds(part * product.inner, product.inner)
    plgpu.copy_gmem_to_smem(x.at[rows, here], tile, landed)
    product.start(*source)
    plgpu.barrier_wait(landed)
    _finish(product, tile, source, out, y)


@functools.partial(jax.jit, static_argnames="interpret")
def gated_matmul_kernel(x, weight, *, interpret=None):
    """`gated_matmul`; `interpret`: parameters of Mosaic's interpreter."""
    parts = parts_of(*weight.shape, unit=GATES)
    product, launch = _plan(x.shape[0], weight, parts, jnp.float32, interpret, copies=1)
    scratch = {"rows": plgpu.SMEM((MOST_ROWS, product.inner), weight.dtype)}
    return launch("gated_matmul", functools.partial(_gated_block, product), scratch)(weight, x)


def _gated_block(product, weight, x, y, *, ring, tile, arrived, rows, out):
    """A block gates its features, while its weight is under way."""
    source = _source(product, weight, ring, arrived)
    product.start(*source)
    layout = plgpu.Layout.WG_STRIDED((product.inner,), vec_size=4)
    load, begin = functools.partial(access.load, layout=layout), source[1]
    halves = [pl.ds(first + begin, product.inner) for first in (0, weight.shape[0])]
    loaded = [[load(x.at[token, half]) for half in halves] for token in range(x.shape[0])]
    for token, both in enumerate(loaded):
        gate, other = (a.astype(jnp.float32) for a in both)
        gated = gate / (1.0 + jnp.exp(-gate)) * other
        access.store(rows.at[token], gated.astype(rows.dtype))
    _finish_rows(product, rows, tile, source, out, y)


@functools.partial(jax.jit, static_argnames="interpret")
def gated_norm_matmul_kernel(heads, norm, weight, *, interpret=None):
    """`gated_norm_matmul`; `interpret`: parameters of Mosaic's interpreter."""
    tokens, _, dim = heads.shape
    unit = max(dim, 256)  # what a warp's lanes have of a row
    parts = parts_of(*weight.shape, unit=unit)
    product, launch = _plan(tokens, weight, parts, jnp.float32, interpret, copies=1)
    scratch = {"rows": plgpu.SMEM((MOST_ROWS, product.inner // dim, dim), weight.dtype)}
    block = functools.partial(_norm_block, product, norm.first, norm.eps)
    return launch("gated_norm_matmul", block, scratch)(weight, heads, norm.gates, norm.weight)


def _norm_block(
    product, first, eps, weight, heads, gates, norm, y, *, ring, tile, arrived, rows, out
):
    """The heads of a block's features are normed by it, while its weight is under way."""
    source = _source(product, weight, ring, arrived)
    product.start(*source)
    (tokens, _, dim), begin = heads.shape, lax.axis_index("part") * product.inner
    some = product.inner // dim, dim
    layout = layouts.piece_layout(*some, itemsize=4)
    load = functools.partial(access.load, layout=layout)
    scale = access.load(norm, layout.reduce(0))
    mine, columns = pl.ds(lax.div(begin, dim), some[0]), pl.ds(first + begin, product.inner)
    loaded = [
        (load(heads.at[t, mine]), load(gates.at[t, columns].reshape(*some))) for t in range(tokens)
    ]
    for t, (x, gate) in enumerate(loaded):
        normed = gated_norm_block.in_kernel(layout, x, gate, scale, eps)
        access.store(rows.at[t], normed.astype(rows.dtype))
    _finish_rows(product, rows, tile, source, out, y)
