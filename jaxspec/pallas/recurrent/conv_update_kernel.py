"""`conv_update` on a Hopper GPU, and the convolution for kernels that go on with it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.recurrent.conv_ring import _VECTOR, ring_place


@functools.partial(jax.jit, static_argnames="interpret")
def conv_update_kernel(x, taps, conv, layer, slots, num_computed, query_len, *, interpret=None):
    """`conv_update` on a Hopper GPU, with `taps` `[kernel, channels]`.

    A block has some channels of one row, and a thread its own. Padding rows are computed on what
    their clamped indices give, and not stored. `interpret`: parameters of Mosaic's interpreter.
    """

    rows, width, channels = x.shape
    size, layout = device.THREADS * _VECTOR, layouts.vectors(_VECTOR)

    def body(x, *refs):
        *operands, out = refs
        row, block = lax.axis_index("row"), pl.ds(lax.axis_index("part") * size, size)

        def put(t, y):
            access.store(out.at[row, t, block], y.astype(out.dtype))

        new = [access.load(x.at[row, t, block], layout) for t in range(width)]
        convolve(new, operands, block, layout, put)

    operands = x, taps, layer[None], slots, num_computed, query_len
    return launch(body, operands, conv, x, (channels // size, rows), interpret)


def convolve(new, operands, block, layout, put):
    """A block's part of a kernel: `put(t, y)` gets the float32 outputs of its row's token `t`.

    `new` has a row's tokens, loaded first because their addresses do not wait for an index.
    `operands` are references as `launch` hands them on: taps `[kernel, *channels]` (channels may be
    cut into heads), layer `[1]`, slots, positions and lengths `[rows]`, and the pool `[layers,
    slots, window, *channels]`. `block` is of the first axis of channels, `layout` that of its
    registers.
    """

    taps, layer, slots, num_computed, query_len, pool = operands
    load, store = access.load, access.store
    _, num_slots, window = pool.shape[:3]
    width, history, row = len(new), taps.shape[0] - 1, lax.axis_index("row")
    weights = [load(taps.at[i, block], layout).astype(jnp.float32) for i in range(history + 1)]
    slot, count, first = slots[row], query_len[row], ring_place(num_computed[row], window)
    place = layer[0], jnp.clip(slot, 0, num_slots - 1)

    def ref(ago):
        return pool.at[*place, lax.rem(first + (window - ago), window), block]

    past = [load(ref(history - i), layout) for i in range(history)]

    @pl.when((slot > 0) & (slot < num_slots))
    def _():
        for t in range(width):

            @pl.when(t < count)
            def _(t=t):
                store(ref(-t), new[t])

    inputs = [values.astype(jnp.float32) for values in (*past, *new)]
    for t in range(width):
        put(t, convolved(inputs[t : t + history + 1], weights))


def convolved(inputs: list[Any], weights: list[Any]) -> Any:
    """A token's float32 output: SiLU of the sum of its inputs, the oldest first, times the taps."""
    products = (x * tap for x, tap in zip(inputs, weights, strict=True))
    return _silu(functools.reduce(jnp.add, products))


def launch(body, operands, conv, outputs, grid, interpret):
    """Run `body` on a grid of parts and rows: its outputs, and the pool `conv`, written in place.

    `body` gets references to `operands`, the pool, and an array for each of `outputs`, a pytree of
    anything with shape and dtype. `interpret`: parameters of Mosaic's interpreter, or None.
    """
    kernel = plgpu.kernel(
        body,
        kernel_name="conv_update",
        out_type=jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), outputs),
        grid=grid,
        grid_names=("part", "row"),  # the last part of all rows begins last
        # Safe without barriers: what a row's tokens read is not what they write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    pool = jax.new_ref(conv, memory_space=plgpu.GMEM)
    return kernel(*operands, pool), jax.freeze(pool)


def _silu(x):
    """`x / (1 + exp(-x))`; a square root's reciprocal, squared, is cheaper than a division."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return x * (root * root)
