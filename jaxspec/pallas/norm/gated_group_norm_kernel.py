"""Pallas (Mosaic GPU) kernel of `GatedGroupNorm` for Hopper GPUs."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device


@functools.partial(jax.jit, static_argnames="interpret")
def gated_group_norm_kernel(norm, y, *, interpret=None):
    """Run a `GatedGroupNorm` on float32 `[tokens, features]`: each block has a group of a token."""
    tokens, features = y.shape
    size = features // norm.groups
    # Elements that a thread loads at once, limited by the alignment of the rows of gates, and by
    # an even split of a group over all threads.
    vector = math.gcd(4, norm.first, norm.gates.shape[1], size // device.THREADS)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)

    def body(y, gates, weight, out):
        row, group = lax.axis_index("row"), lax.axis_index("group")
        block, load = pl.ds(group * size, size), functools.partial(access.load, layout=layout)
        # All loads precede the first use, so that the block waits for memory only once.
        z = load(gates.at[row, pl.ds(norm.first + group * size, size)])
        wide, scale = load(y.at[row, block]), load(weight.at[block])
        z = z.astype(jnp.float32)
        gate = z / (1.0 + jnp.exp(-z))
        if norm.gate_first:
            wide = wide * gate
        root = lax.rsqrt(jnp.sum(wide * wide) * (1 / size) + norm.eps)
        normed = wide * root * scale
        if not norm.gate_first:
            normed = normed * gate
        access.store(out.at[row, block], normed.astype(out.dtype))

    kernel = plgpu.kernel(
        body,
        kernel_name="gated_group_norm",
        out_type=jax.ShapeDtypeStruct(y.shape, norm.gates.dtype),
        grid=(norm.groups, tokens),
        grid_names=("group", "row"),
        # No automatic barriers: a block reads nothing that it writes, but for reduction scratch.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(y, norm.gates, norm.weight)
