"""The kernels that bring tokens to their tiles and back (Pallas, Mosaic GPU): a block a token."""

import functools
from math import gcd, prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts

_COPY = 256  # elements of a copy's last axis, at most


@functools.partial(jax.jit, static_argnames=("none", "interpret"))
def to_tiles_kernel(x, work, choices, *, none, interpret=None):
    """The rows of `x` at their places, and which choice and which weight each place has.

    `work` is the `WorkList` of `choices`, and `none` the expert of padding, whose rows are not
    copied. Returns `[tiles, rows, features]`, and int32 and float32 `[tiles, rows]`; places without
    a choice keep what the memory held. `interpret` has parameters of Mosaic's interpreter, here and
    below.
    """
    (tokens, features), (tiles, rows) = x.shape, (work.expert.shape[0], work.rows)
    parts, width = choices.experts.shape[1], gcd(features, _COPY)
    pieces = features // width, width

    def body(x, place, experts, weights, tiled, at_place, scales, *, row, filled):
        token = lax.axis_index("token")
        plgpu.copy_gmem_to_smem(x.at[token], row, filled)
        is_live = experts[token, 0] < none
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
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    tiled, at_place, scales = kernel(
        x.reshape(tokens, *pieces), work.place, choices.experts, choices.weights
    )
    return (
        tiled.reshape(tiles, rows, features),
        at_place.reshape(tiles, rows),
        scales.reshape(tiles, rows),
    )


@functools.partial(jax.jit, static_argnames=("none", "interpret"))
def from_tiles_kernel(tiled, work, choices, *, none, interpret=None):
    """The sum of each token's rows, in their order: `[tokens, features]`, in their dtype.

    Padding gets zeros; `work`, `choices` and `none` are those of `to_tiles_kernel`.
    """
    features, (tokens, parts) = tiled.shape[-1], choices.experts.shape
    pieces = layouts.row_pieces(features, tiled.dtype.itemsize)

    def body(tiled, place, experts, y):
        token = lax.axis_index("token")
        is_live = experts[token, 0] < none

        @pl.when(is_live)
        def _():
            # Every load comes before the first use, so the block waits for the memory once.
            places = [place[token, part] for part in range(parts)]
            loaded = [
                [access.load(tiled.at[at, piece.columns], piece.layout) for at in places]
                for piece in pieces
            ]
            for piece, rows in zip(pieces, loaded, strict=True):
                total = jnp.zeros((piece.size,), jnp.float32)
                for row in rows:
                    total = total + row.astype(jnp.float32)
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
