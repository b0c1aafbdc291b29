"""The kernel of `add_norm` for a Hopper GPU (Pallas, Mosaic GPU)."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device


@functools.partial(jax.jit, static_argnames="interpret")
def add_norm_kernel(stream, pending, norm, *, interpret=None):
    """`add_norm` where something is pending: a block has one row, all of it in registers.

    `interpret`: parameters of Mosaic's interpreter.
    """
    tokens, features = stream.shape
    vector = 16 // stream.dtype.itemsize
    if features % (device.THREADS * vector):
        vector = 4  # accesses of 8 bytes: Qwen3.5-4B has 2560 features in 16 bits
    layout = plgpu.Layout.WG_STRIDED((features,), vec_size=vector)

    def body(stream, pending, weight, total, normed):
        row, load = lax.axis_index("row"), functools.partial(access.load, layout=layout)
        is_tokens = len(pending.shape) == 2
        indices = [(row,)] if is_tokens else [(part, row) for part in range(pending.shape[0])]
        # Every load comes before the first use, so the block waits for the memory once.
        old = load(stream.at[row])
        parts = [load(pending.at[index]) for index in indices]
        scale = load(weight)
        new = functools.reduce(operator.add, parts).astype(stream.dtype)
        rounded = (old.astype(jnp.float32) + new.astype(jnp.float32)).astype(stream.dtype)
        wide = rounded.astype(jnp.float32)
        access.store(total.at[row], rounded)
        root = lax.rsqrt(jnp.sum(wide * wide) * (1 / features) + norm.eps)
        scale = scale.astype(jnp.float32)
        if norm.zero_centred:
            scale = scale + 1.0
        access.store(normed.at[row], (wide * root * scale).astype(stream.dtype))

    out = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    kernel = plgpu.kernel(
        body,
        kernel_name="add_norm",
        out_type=(out, out),
        grid=(tokens,),
        grid_names=("row",),
        # No barriers are needed: the block writes nothing that it reads, except the sum's scratch.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(stream, pending, norm.weight)
