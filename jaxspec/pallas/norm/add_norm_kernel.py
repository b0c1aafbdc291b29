"""Pallas (Mosaic GPU) kernel of `add_norm` for Hopper GPUs."""

import functools

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.norm import add_norm_block


@functools.partial(jax.jit, static_argnames="interpret")
def add_norm_kernel(stream, pending, norm, *, interpret=None):
    """Run `add_norm` for a given `pending`: each block holds one whole row in registers."""
    tokens, features = stream.shape
    pieces = layouts.row_pieces(features, stream.dtype.itemsize)

    def body(stream, pending, weight, total, normed):
        row = lax.axis_index("row")
        result = add_norm_block.in_kernel(stream, pending, weight, total, norm, row, pieces)
        for piece, x in zip(pieces, result, strict=True):
            access.store(normed.at[row, piece.columns], x)

    out = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    kernel = plgpu.kernel(
        body,
        kernel_name="add_norm",
        out_type=(out, out),
        grid=(tokens,),
        grid_names=("row",),
        # No automatic barriers: a block reads nothing that it writes, but for reduction scratch.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(stream, pending, norm.weight)
