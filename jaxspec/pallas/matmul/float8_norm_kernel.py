"""Kernel of residual add, RMSNorm and the e4m3 numbers of the result (Pallas, Mosaic GPU).

A block has one row, as in `add_norm_kernel`, but a chunk of 128 features is in lanes of one warp.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.gpu.layouts import RowPiece
from jaxspec.pallas.matmul.float8_terms import CHUNK, Terms, padded_rows, rounded, split
from jaxspec.pallas.norm import add_norm_block


@functools.partial(jax.jit, static_argnames=("terms", "interpret"))
def add_norm_split_kernel(stream, pending, norm, terms, *, interpret=None):
    """Return what `add_norm` does, and two `Terms` of the norm, or one."""
    (tokens, features), dtype = stream.shape, stream.dtype
    chunks = features // CHUNK
    pieces = [
        RowPiece(start, size, layouts.piece_layout(size, CHUNK, dtype.itemsize))
        for start, size in layouts.pieces_of(chunks)
    ]

    def body(stream, pending, weight, total, normed, *outputs):
        *numbers, factors = outputs
        row = lax.axis_index("row")
        result = add_norm_block.in_kernel(stream, pending, weight, total, norm, row, pieces)
        for piece, x in zip(pieces, result, strict=True):
            access.store(normed.at[row, piece.columns], x)
            wide = x.astype(jnp.float32)
            *of_terms, factor = split(wide) if terms == 2 else rounded(wide)
            for target, number in zip(numbers, of_terms, strict=True):
                access.store(target.at[row, piece.columns], number)
            access.store(factors.at[piece.columns, row], factor)

    by_chunk = tokens, chunks, CHUNK
    out = jax.ShapeDtypeStruct(by_chunk, dtype)
    rows = padded_rows(tokens)
    of_numbers = [jax.ShapeDtypeStruct((rows, chunks, CHUNK), jnp.float8_e4m3fn)] * terms
    of_factors = jax.ShapeDtypeStruct((chunks, rows), jnp.float32)
    kernel = plgpu.kernel(
        body,
        kernel_name="float8_add_norm_split",
        out_type=(out, out, *of_numbers, of_factors),
        grid=(tokens,),
        grid_names=("row",),
        # No automatic barriers: a block reads nothing that it writes, but for reduction scratch.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    total, normed, *numbers, factors = kernel(
        stream.reshape(by_chunk),
        pending.reshape(*pending.shape[:-1], chunks, CHUNK),
        norm.weight.reshape(chunks, CHUNK),
    )
    numbers = tuple(number.reshape(rows, features) for number in numbers)
    return total.reshape(stream.shape), normed.reshape(stream.shape), Terms(numbers, factors)
