"""Residual add and RMSNorm of a row inside a kernel, whose threads hold the whole row."""

import functools
import math
import operator

import jax.numpy as jnp
from jax import lax

from jaxspec.pallas.gpu import access


def in_kernel(stream, pending, weight, total, norm, row, pieces):
    """Write the sum of a row to `total`, and return its norm: an array for each of `pieces`.

    All are references of `add_norm`'s operands, and `norm` has the constants. Features may have two
    axes; a piece has `columns`, those of the first, and their `layout`.
    """
    dtype, features = stream.dtype, math.prod(weight.shape)
    is_tokens = len(pending.shape) == len(stream.shape)
    indices = [(row,)] if is_tokens else [(part, row) for part in range(pending.shape[0])]

    def load(piece):
        """Load stream, pending parts and weight; all loads are issued before the first use."""
        of_piece = functools.partial(access.load, layout=piece.layout)
        parts = [of_piece(pending.at[*index, piece.columns]) for index in indices]
        return of_piece(stream.at[row, piece.columns]), parts, of_piece(weight.at[piece.columns])

    loaded, wide, normed = [load(piece) for piece in pieces], [], []
    for piece, (old, parts, _) in zip(pieces, loaded, strict=True):
        new = functools.reduce(operator.add, parts).astype(dtype)
        rounded = (old.astype(jnp.float32) + new.astype(jnp.float32)).astype(dtype)
        access.store(total.at[row, piece.columns], rounded)
        wide.append(rounded.astype(jnp.float32))
    square = functools.reduce(operator.add, [_sum(x * x) for x in wide])
    root = lax.rsqrt(square * (1 / features) + norm.eps)
    for x, (_, _, scale) in zip(wide, loaded, strict=True):
        scale = scale.astype(jnp.float32)
        if norm.zero_centred:
            scale = scale + 1.0
        normed.append((x * root * scale).astype(dtype))
    return normed


def _sum(x):
    """Return the sum of `x` as a scalar; Mosaic finds layouts for one axis at a time."""
    return jnp.sum(x) if x.ndim == 1 else jnp.sum(jnp.sum(x, axis=1))
