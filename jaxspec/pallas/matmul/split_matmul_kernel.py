"""Kernels of the ops in `split_matmul` for up to 8 rows (Pallas, Mosaic GPU).

They include `matmul_kernel`, the matmul that is not split.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.matmul.skinny_gemm import GATE_UNIT, MAX_ROWS, num_parts
from jaxspec.pallas.matmul.skinny_gemm_kernel import SkinnyTiling, WeightStream, put_out
from jaxspec.pallas.norm import gated_norm_block


@functools.partial(jax.jit, static_argnames="interpret")
def split_matmul_kernel(x, weight, *, interpret=None):
    """Run `split_matmul`; `weight` is the array of a `Dense`, as in all these kernels."""
    parts = num_parts(*weight.shape, unit=64)
    tiling, launch = _plan(x.shape[0], weight, parts, jnp.float32, interpret)

    def body(weight, x, y, *, loaded, **scratch):
        _multiply_rows(tiling, x, loaded, _Refs(weight, y, **scratch))

    return launch("split_matmul", body, {"loaded": plgpu.Barrier()})(weight, x)


@functools.partial(jax.jit, static_argnames="interpret")
def matmul_kernel(x, weight, *, interpret=None):
    """Return `x @ weight` in their dtype, for operands that `skinny_gemm` accepts."""
    tiling, launch = _plan(x.shape[0], weight, 1, x.dtype, interpret)

    def body(weight, x, y, *, loaded, **scratch):
        _multiply_rows(tiling, x, loaded, _Refs(weight, y, **scratch))

    (y,) = launch("skinny_gemm", body, {"loaded": plgpu.Barrier()})(weight, x)
    return y


@functools.partial(jax.jit, static_argnames="interpret")
def gated_matmul_kernel(x, weight, *, interpret=None):
    launch, *parts = _activating(x, weight, Activation.SWIGLU, interpret)
    return launch("gated_matmul", *parts)(weight, x)


@functools.partial(jax.jit, static_argnames="interpret")
def squared_relu_matmul_kernel(x, weight, *, interpret=None):
    launch, *parts = _activating(x, weight, Activation.SQUARED_RELU, interpret)
    return launch("squared_relu_matmul", *parts)(weight, x)


def _activating(x, weight, activation, interpret):
    """Return `launch` of the matmul of the activated `x`, its body and its scratch."""
    parts = num_parts(*weight.shape, unit=GATE_UNIT)
    tiling, launch = _plan(x.shape[0], weight, parts, jnp.float32, interpret, copies=1)

    def body(weight, x, y, *, rows, **scratch):
        _activate_and_multiply(tiling, activation, x, rows, _Refs(weight, y, **scratch))

    return launch, body, {"rows": plgpu.SMEM((MAX_ROWS, tiling.inner), weight.dtype)}


@functools.partial(jax.jit, static_argnames="interpret")
def gated_norm_matmul_kernel(heads, norm, weight, *, interpret=None):
    tokens, _, dim = heads.shape
    unit = max(dim, 256)  # channels of a row that one warp holds
    parts = num_parts(*weight.shape, unit=unit)
    tiling, launch = _plan(tokens, weight, parts, jnp.float32, interpret, copies=1)

    def body(weight, heads, gates, scale, y, *, rows, **scratch):
        refs = _Refs(weight, y, **scratch)
        _norm_and_multiply(tiling, norm, _HeadRefs(heads, gates, scale), rows, refs)

    scratch = {"rows": plgpu.SMEM((MAX_ROWS, tiling.inner // dim, dim), weight.dtype)}
    return launch("gated_norm_matmul", body, scratch)(weight, heads, norm.gates, norm.weight)


def _plan(tokens, weight, parts, dtype, interpret, copies=0):
    """Return the tiling of one part, and `launch(name, body, scratch)`, which builds the kernel.

    `dtype` is that of the output. `copies` is the number of copies of a block's rows in the
    scratch.
    """
    inner, outer = weight.shape
    columns = pl.cdiv(outer, BLOCK_N)
    reserved = copies * 2 * MAX_ROWS * (inner // parts) + 4096
    tiling = SkinnyTiling.of(weight, inner // parts, parts * columns, reserved)

    def launch(name, body, scratch):
        return plgpu.kernel(
            body,
            kernel_name=name,
            out_type=jax.ShapeDtypeStruct((parts, tokens, outer), dtype),
            scratch_types=tiling.scratch()
            | {"out": plgpu.SMEM((MAX_ROWS, BLOCK_N), dtype)}
            | scratch,
            grid=(columns, parts),
            grid_names=("column", "part"),
            compiler_params=access.EXPLICIT_BARRIERS,
            **({} if interpret is None else {"interpret": interpret}),
        )

    return tiling, launch


class _Refs(NamedTuple):
    """References common to all blocks; the last four are shared memory."""

    weight: Any
    y: Any
    ring: Any
    filled: Any
    tile: Any  # the rows, tiled for wgmma
    out: Any


class _HeadRefs(NamedTuple):
    heads: Any
    gates: Any
    scale: Any


def _weights(tiling, refs):
    column, part = lax.axis_index("column") * BLOCK_N, lax.axis_index("part")
    return WeightStream(refs.weight, part * tiling.inner, column, refs.ring, refs.filled)


def _multiply_tile(tiling, weights, refs):
    columns = pl.ds(lax.axis_index("column") * BLOCK_N, BLOCK_N)
    sums = tiling.run(refs.tile, weights)
    put_out(sums, refs.out, refs.y.at[lax.axis_index("part"), :, columns])


def _retile(tiling, rows, refs):
    """Copy rows from untiled shared memory to `tile`."""
    plgpu.commit_smem()
    access.store(refs.tile, access.load(rows.reshape(*refs.tile.shape), tiling.layout()))
    plgpu.commit_smem()


def _multiply_rows(tiling, x, loaded, refs):
    """Multiply rows of `x` directly; rows past the last of `x` are filled with zeros."""
    weights, part = _weights(tiling, refs), lax.axis_index("part")
    # A traced 0, because jax 0.12 rejects rows that are statically out of bounds.
    rows = pl.ds(part * 0, MAX_ROWS)
    features = pl.ds(part * tiling.inner, tiling.inner)
    plgpu.copy_gmem_to_smem(x.at[rows, features], refs.tile, loaded)
    tiling.start(weights)
    plgpu.barrier_wait(loaded)
    _multiply_tile(tiling, weights, refs)


def _activate_and_multiply(tiling, activation, x, rows, refs):
    """Activate a block's features while its weight is being copied, and multiply them."""
    weights = _weights(tiling, refs)
    tiling.start(weights)
    layout = plgpu.Layout.WG_STRIDED((tiling.inner,), vec_size=4)
    load = functools.partial(access.load, layout=layout)
    # First columns in `x` of gate and up, or of up alone.
    starts = [piece * refs.weight.shape[0] for piece in range(activation.pieces)]
    columns = [pl.ds(start + weights.first_row, tiling.inner) for start in starts]
    loaded = [[load(x.at[token, some]) for some in columns] for token in range(x.shape[0])]
    for token, pieces in enumerate(loaded):
        activated = activation.of_blocks([a.astype(jnp.float32) for a in pieces])
        access.store(rows.at[token], activated.astype(rows.dtype))
    _retile(tiling, rows, refs)
    _multiply_tile(tiling, weights, refs)


def _norm_and_multiply(tiling, norm, operands, rows, refs):
    """Normalize and gate a block's heads while its weight is being copied, and multiply them."""
    weights = _weights(tiling, refs)
    tiling.start(weights)
    (tokens, _, dim), first = operands.heads.shape, lax.axis_index("part") * tiling.inner
    shape = tiling.inner // dim, dim  # heads per block, and channels
    layout = layouts.piece_layout(*shape, itemsize=4)
    load = functools.partial(access.load, layout=layout)
    scale = access.load(operands.scale, layout.reduce(0))
    heads = pl.ds(lax.div(first, dim), shape[0])
    columns = pl.ds(norm.first + first, tiling.inner)
    loaded = [
        (load(operands.heads.at[t, heads]), load(operands.gates.at[t, columns].reshape(*shape)))
        for t in range(tokens)
    ]
    for t, (x, gate) in enumerate(loaded):
        normed = gated_norm_block.in_kernel(layout, x, gate, scale, norm)
        access.store(rows.at[t], normed.astype(rows.dtype))
    _retile(tiling, rows, refs)
    _multiply_tile(tiling, weights, refs)
