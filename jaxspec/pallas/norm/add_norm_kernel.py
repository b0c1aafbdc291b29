"""Pallas (Mosaic GPU) kernel of `add_norm` for Hopper GPUs."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts


@functools.partial(jax.jit, static_argnames="interpret")
def add_norm_kernel(stream, pending, norm, *, interpret=None):
    """Run `add_norm` for a given `pending`: each block holds one whole row in registers."""
    tokens, features = stream.shape
    pieces = layouts.row_pieces(features, stream.dtype.itemsize)

    def body(stream, pending, weight, total, normed):
        row, dtype = lax.axis_index("row"), stream.dtype
        is_tokens = len(pending.shape) == 2
        indices = [(row,)] if is_tokens else [(part, row) for part in range(pending.shape[0])]

        def load(piece):
            """Load stream, pending parts and weight; all loads are issued before the first use."""
            of_piece = functools.partial(access.load, layout=piece.layout)
            parts = [of_piece(pending.at[*index, piece.columns]) for index in indices]
            return (
                of_piece(stream.at[row, piece.columns]),
                parts,
                of_piece(weight.at[piece.columns]),
            )

        loaded, wide = [load(piece) for piece in pieces], []
        for piece, (old, parts, _) in zip(pieces, loaded, strict=True):
            new = functools.reduce(operator.add, parts).astype(dtype)
            rounded = (old.astype(jnp.float32) + new.astype(jnp.float32)).astype(dtype)
            access.store(total.at[row, piece.columns], rounded)
            wide.append(rounded.astype(jnp.float32))
        square = functools.reduce(operator.add, [jnp.sum(x * x) for x in wide])
        root = lax.rsqrt(square * (1 / features) + norm.eps)
        for piece, x, (_, _, scale) in zip(pieces, wide, loaded, strict=True):
            scale = scale.astype(jnp.float32)
            if norm.zero_centred:
                scale = scale + 1.0
            access.store(normed.at[row, piece.columns], (x * root * scale).astype(dtype))

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
