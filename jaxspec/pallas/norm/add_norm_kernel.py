"""`add_norm` on a Hopper GPU."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device


@functools.partial(jax.jit, static_argnames=("eps", "zero_centred", "interpret"))
def add_norm_kernel(x, delta, weight, *, eps, zero_centred, interpret=None):
    """`add_norm` on a Hopper GPU: a block has one row, all of it in registers.

    `interpret`: parameters of Mosaic's interpreter.
    """

    tokens, features = x.shape
    vector = 16 // x.dtype.itemsize
    if features % (device.THREADS * vector):
        vector = 4  # 8 bytes: Qwen3.5-4B's 2560 in 16 bits
    layout = plgpu.Layout.WG_STRIDED((features,), vec_size=vector)

    def body(x, delta, weight, total, normed):
        row, load = lax.axis_index("row"), functools.partial(access.load, layout=layout)
        # All loads before the first use, the weight's too: one wait for the memory.
        where = (
            [(row,)] if len(delta.shape) == 2 else [(part, row) for part in range(delta.shape[0])]
        )
        old, parts, scale = load(x.at[row]), [load(delta.at[i]) for i in where], load(weight)
        new = functools.reduce(operator.add, parts).astype(x.dtype)
        rounded = (old.astype(jnp.float32) + new.astype(jnp.float32)).astype(x.dtype)
        wide = rounded.astype(jnp.float32)
        access.store(total.at[row], rounded)
        root = lax.rsqrt(jnp.sum(wide * wide) * (1 / features) + eps)
        scale = scale.astype(jnp.float32) + 1.0 if zero_centred else scale.astype(jnp.float32)
        access.store(normed.at[row], (wide * root * scale).astype(x.dtype))

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = plgpu.kernel(
        body,
        kernel_name="add_norm",
        out_type=(out, out),
        grid=(tokens,),
        grid_names=("row",),
        # Safe without barriers: nothing is read that is written, but the sum's own scratch.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, delta, weight)
