"""Kernels that gather tokens into tiles by expert, and sum the results (Pallas, Mosaic GPU).

A block handles one token.
"""

import functools
import operator
from math import gcd, prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts

_COPY = 256  # maximum elements in the last axis of a copy


@functools.partial(jax.jit, static_argnames=("none", "interpret"))
def to_tiles_kernel(x, work, choices, *, none, interpret=None):
    """Copy the rows of `x` to their places in the tiles.

    Returns `[tiles, rows, features]`, and the choice (int32) and weight (float32) of each place,
    both `[tiles, rows]`. Places without a choice are uninitialized.

    Args:
        x: `[tokens, features]`, or more rows, which are not copied.
        work: `WorkList` of `choices`.
        choices: experts and weights of each token.
        none: expert of padding, whose rows are not copied.
    """
    (tokens, parts), features = choices.experts.shape, x.shape[1]
    tiles, rows, width = work.expert.shape[0], work.rows, gcd(features, _COPY)
    pieces, has_gaps = (features // width, width), choices.has_gaps

    def body(x, place, experts, weights, tiled, at_place, scales, *, row, filled):
        token = lax.axis_index("token")
        plgpu.copy_gmem_to_smem(x.at[token], row, filled)
        is_live = _is_live(experts, token, none, has_gaps)
        places = [place[token, part] for part in range(parts)]
        for part, at in enumerate(places):
            at_place[at] = token * parts + part
            scales[at] = weights[token, part]
        plgpu.barrier_wait(filled)

        @pl.when(is_live)
        def _():
            for at in places:
                plgpu.copy_smem_to_gmem(row, tiled.at[at])
            plgpu.wait_smem_to_gmem(0)

    size = tiles * rows
    kernel = plgpu.kernel(
        body,
        kernel_name="moe_to_tiles",
        out_type=(
            jax.ShapeDtypeStruct((size, *pieces), x.dtype),
            jax.ShapeDtypeStruct((size,), jnp.int32),
            jax.ShapeDtypeStruct((size,), jnp.float32),
        ),
        scratch_types={"row": plgpu.SMEM(pieces, x.dtype), "filled": plgpu.Barrier()},
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    tiled, at_place, scales = kernel(
        x.reshape(x.shape[0], *pieces), work.place, choices.experts, choices.weights
    )
    return (
        tiled.reshape(tiles, rows, features),
        at_place.reshape(tiles, rows),
        scales.reshape(tiles, rows),
    )


def _is_live(experts, token, none, has_gaps):
    """Return whether a token has an expert; without gaps, all its choices are like the first."""
    parts = range(experts.shape[1] if has_gaps else 1)
    return functools.reduce(operator.or_, [experts[token, part] < none for part in parts])


@functools.partial(jax.jit, static_argnames=("none", "interpret"))
def from_tiles_kernel(tiled, work, choices, *, none, interpret=None):
    """Sum each token's rows in order of its experts: `[tokens, features]`, in their dtype.

    Padding gets zeros; `work`, `choices` and `none` are those of `to_tiles_kernel`.
    """
    features, (tokens, parts) = tiled.shape[-1], choices.experts.shape
    has_gaps = choices.has_gaps
    pieces = layouts.row_pieces(features, tiled.dtype.itemsize)

    def body(tiled, place, experts, y):
        token = lax.axis_index("token")
        is_live = _is_live(experts, token, none, has_gaps)

        @pl.when(is_live)
        def _():
            # All loads are issued before the first use, so the block waits for the memory once.
            places = [place[token, part] for part in range(parts)]
            chosen = [experts[token, part] for part in range(parts if has_gaps else 0)]
            if has_gaps:  # rows without an expert are uninitialized; the first is read in place
                places = [jnp.where(chosen[i] < none, at, 0) for i, at in enumerate(places)]
            loaded = [
                [access.load(tiled.at[at, piece.columns], piece.layout) for at in places]
                for piece in pieces
            ]
            for piece, rows in zip(pieces, loaded, strict=True):
                total = jnp.zeros((piece.size,), jnp.float32)
                for part, row in enumerate(rows):
                    value = row.astype(jnp.float32)
                    if has_gaps:
                        has_expert = jnp.broadcast_to(chosen[part], value.shape) < none
                        value = jnp.where(has_expert, value, jnp.zeros_like(value))
                    total = total + value
                access.store(y.at[token, piece.columns], total.astype(y.dtype))

        @pl.when(~is_live)
        def _():
            for piece in pieces:
                access.store(y.at[token, piece.columns], jnp.zeros((piece.size,), y.dtype))

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_from_tiles",
        out_type=jax.ShapeDtypeStruct((tokens, features), tiled.dtype),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(tiled.reshape(prod(tiled.shape[:-1]), features), work.place, choices.experts)
