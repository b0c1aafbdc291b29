"""Kernel of `grouped_matmul` for up to 8 rows (Pallas, Mosaic GPU)."""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.matmul.skinny_gemm import MAX_ROWS
from jaxspec.pallas.matmul.skinny_gemm_kernel import SkinnyTiling, WeightStream, put_out


@functools.partial(jax.jit, static_argnames=("starts", "interpret"))
def grouped_matmul_kernel(x, weights, *, starts, interpret=None):
    """Run `grouped_matmul`; a block has 64 columns of one of `weights`, the arrays of `Dense`s."""
    (inner, outer), groups, dtype = weights[0].shape, len(weights), x.dtype
    columns = outer // BLOCK_N
    tiling = SkinnyTiling.of(weights[0], inner, groups * columns, 4096)

    def body(x, *refs, **scratch):
        for group in range(groups):
            operands = x, starts[group], refs[group], refs[groups + group]

            @pl.when(lax.axis_index("group") == group)
            def _(operands=operands):
                _multiply(tiling, *operands, **scratch)

    return plgpu.kernel(
        body,
        kernel_name="grouped_matmul",
        out_type=(jax.ShapeDtypeStruct((x.shape[0], outer), dtype),) * groups,
        scratch_types=tiling.scratch()
        | {"out": plgpu.SMEM((MAX_ROWS, BLOCK_N), dtype), "loaded": plgpu.Barrier()},
        grid=(columns, groups),
        grid_names=("column", "group"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )(x, *weights)


def _multiply(tiling, x, start, weight, y, *, ring, filled, tile, out, loaded):
    """Compute a block's columns of `y`; rows past the last of `x` are filled with zeros."""
    column = lax.axis_index("column") * BLOCK_N
    # A traced 0, because jax 0.12 rejects rows that are statically out of bounds.
    rows = pl.ds(column * 0, MAX_ROWS)
    plgpu.copy_gmem_to_smem(x.at[rows, pl.ds(start, tiling.inner)], tile, loaded)
    weights = WeightStream(weight, 0, column, ring, filled)
    tiling.start(weights)
    plgpu.barrier_wait(loaded)
    put_out(tiling.run(tile, weights), out, y.at[:, pl.ds(column, BLOCK_N)])
