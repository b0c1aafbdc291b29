"""Pallas (Mosaic GPU) kernel of `state_select` for Hopper GPUs."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts

_PIECES = 2  # pieces of 16 bytes per thread; 1 to 16 are as fast, and so are TMA copies


@functools.partial(jax.jit, static_argnames="interpret")
def state_select_kernel(states, layer, rows, *, interpret=None):
    """Run `state_select`: each block copies a part of one row's state.

    The size of a state must be a multiple of 4 KiB. XLA's gather is as fast in float32, where it
    can also be fused with its consumer, and slower in 16 bits (op state_select in
    benchmarks/results/kernels_h200.json).
    """

    layers, num_slots, candidates, *state = states.shape
    (num_rows,), size = rows.slots.shape, math.prod(state)
    vector = 16 // states.dtype.itemsize
    piece, layout = device.THREADS * vector, layouts.vectors(vector)

    def body(states, layer, slots, state_offset, out):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        slot = jnp.clip(slots[row], 0, num_slots - 1)
        candidate = jnp.clip(state_offset[row], 0, candidates - 1)
        source = (layer[0] * num_slots + slot) * candidates + candidate
        blocks = [pl.ds((part * _PIECES + i) * piece, piece) for i in range(_PIECES)]
        values = [access.load(states.at[source, block], layout) for block in blocks]
        for block, value in zip(blocks, values, strict=True):
            access.store(out.at[row, block], value)

    kernel = plgpu.kernel(
        body,
        kernel_name="state_select",
        out_type=jax.ShapeDtypeStruct((num_rows, size), states.dtype),
        grid=(num_rows, size // (piece * _PIECES)),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    flat = states.reshape(layers * num_slots * candidates, size)
    return kernel(flat, layer[None], rows.slots, rows.state_offset).reshape(num_rows, *state)
