"""The kernels that bring tokens to their tiles and back (Pallas, Mosaic GPU): a block a token."""

import functools
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device

_COPY = 256  # elements of a copy's last axis, at most


@functools.partial(jax.jit, static_argnames=("tiles", "rows", "interpret"))
def dispatch_kernel(x, place, weights, *, tiles, rows, interpret=None):
    """The rows of `x` at their places in tiles, and which choice and weight each place has.

    Places without a choice keep what the memory held.
    """
    (tokens, features), parts = x.shape, place.shape[1]
    pieces = features // _COPY, _COPY

    def body(x, place, weights, tiled, choices, scales, *, row, filled):
        token = lax.axis_index("token")
        plgpu.copy_gmem_to_smem(x.at[token], row, filled)
        places = [place[token, part] for part in range(parts)]
        for part, at in enumerate(places):
            choices[at] = token * parts + part
            scales[at] = weights[token, part]
        plgpu.barrier_wait(filled)
        for at in places:
            plgpu.copy_smem_to_gmem(row, tiled.at[at])
        plgpu.wait_smem_to_gmem(0)

    size = tiles * rows
    kernel = plgpu.kernel(
        body,
        kernel_name="moe_dispatch",
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
    tiled, choices, scales = kernel(x.reshape(tokens, *pieces), place, weights)
    return (
        tiled.reshape(tiles, rows, features),
        choices.reshape(tiles, rows),
        scales.reshape(tiles, rows),
    )


@functools.partial(jax.jit, static_argnames=("none", "interpret"))
def combine_kernel(tiled, place, experts, *, none, interpret=None):
    """The sum of each token's rows, `[tokens, features]` in the dtype of `tiled`."""
    (*_, features), (tokens, parts) = tiled.shape, place.shape
    vector = gcd(features // device.THREADS, 16 // tiled.dtype.itemsize)
    layout = plgpu.Layout.WG_STRIDED((features,), vec_size=vector)

    def body(tiled, place, experts, y):
        token = lax.axis_index("token")
        is_live = experts[token, 0] < none

        @pl.when(is_live)
        def _():
            # Every load comes before the first use, so the block waits for the memory once.
            rows = [access.load(tiled.at[place[token, part]], layout) for part in range(parts)]
            total = jnp.zeros((features,), jnp.float32)
            for row in rows:
                total = total + row.astype(jnp.float32)
            access.store(y.at[token], total.astype(y.dtype))

        @pl.when(~is_live)
        def _():
            access.store(y.at[token], jnp.zeros((features,), y.dtype))

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_combine",
        out_type=jax.ShapeDtypeStruct((tokens, features), tiled.dtype),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(tiled.reshape(-1, features), place, experts)
