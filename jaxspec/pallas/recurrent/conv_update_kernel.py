"""Pallas (Mosaic GPU) kernel of `conv_update`, and its convolution for use in other kernels."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.recurrent.conv_ring import CHANNELS_PER_THREAD, Activation, ring_place
from jaxspec.regions import DecodeRegion


class ConvOperands(NamedTuple):
    """Operands of `convolve` besides the tokens: arrays for `launch`, references in a kernel."""

    taps: Any  # [kernel, *channels]; the channels may be split into heads
    layer: Any  # [1]
    slots: Any  # [rows]
    num_computed: Any  # [rows]
    query_len: Any  # [rows]
    bias: Any  # [*channels], or None

    @classmethod
    def of(
        cls, taps: jax.Array, layer: jax.Array, rows: DecodeRegion, bias: jax.Array | None = None
    ) -> "ConvOperands":
        """Return the operands for one layer, whose index is a scalar on the device."""
        return cls(taps, layer[None], rows.slots, rows.num_computed, rows.query_len, bias)


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def conv_update_kernel(
    x, taps, pool, layer, rows, bias=None, *, activation: Activation = "silu", interpret=None
):
    """Run `conv_update`.

    Each block computes a range of one row's channels, `CHANNELS_PER_THREAD` in each thread. Padding
    rows are computed from clamped indices, and their inputs are not stored.
    """

    num_rows, width, channels = x.shape
    size, layout = device.THREADS * CHANNELS_PER_THREAD, layouts.vectors(CHANNELS_PER_THREAD)

    def body(x, conv, pool, out):
        row, block = lax.axis_index("row"), pl.ds(lax.axis_index("part") * size, size)

        def put(t, y):
            access.store(out.at[row, t, block], y.astype(out.dtype))

        new = [access.load(x.at[row, t, block], layout) for t in range(width)]
        convolve(new, conv, pool, block, layout, put, activation)

    operands = x, ConvOperands.of(taps, layer, rows, bias)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(body, operands, pool, out, grid=(channels // size, num_rows), interpret=interpret)


def convolve(new, conv, pool, block, layout, put, activation: Activation = "silu"):
    """Convolve a block's channels of one row; call `put(t, y)` with token `t`'s float32 outputs.

    `new` holds the row's tokens in registers; the caller loads them first, because their addresses
    do not wait for the load of an index. `conv` is a `ConvOperands` of references, and `pool` a
    reference `[layers, slots, window, *channels]`. `block` slices the first axis of the channels,
    and `layout` is the register layout of such a slice.
    """

    load, store = access.load, access.store
    _, num_slots, window = pool.shape[:3]
    width, history, row = len(new), conv.taps.shape[0] - 1, lax.axis_index("row")
    weights = [load(conv.taps.at[i, block], layout).astype(jnp.float32) for i in range(history + 1)]
    bias = None if conv.bias is None else load(conv.bias.at[block], layout).astype(jnp.float32)
    slot, count = conv.slots[row], conv.query_len[row]
    first = ring_place(conv.num_computed[row], window)
    layer, own_slot = conv.layer[0], jnp.clip(slot, 0, num_slots - 1)

    def input_ref(ago):
        return pool.at[layer, own_slot, lax.rem(first + (window - ago), window), block]

    past = [load(input_ref(history - i), layout) for i in range(history)]

    # A live row also has tokens: the comparison with `count` tests that.
    @pl.when((slot > 0) & (slot < num_slots))
    def _():
        for t in range(width):

            @pl.when(t < count)
            def _(t=t):
                store(input_ref(-t), new[t])

    inputs = [values.astype(jnp.float32) for values in (*past, *new)]
    for t in range(width):
        put(t, convolved(inputs[t : t + history + 1], weights, bias, activation))


def convolved(
    inputs: list[Any], weights: list[Any], bias: Any = None, activation: Activation = "silu"
) -> Any:
    """Return a token's float32 output: inputs (oldest first) times taps, bias, activation."""
    products = [x * tap for x, tap in zip(inputs, weights, strict=True)]
    if bias is not None:
        products.append(bias)
    total = functools.reduce(jnp.add, products)
    return _silu(total) if activation == "silu" else total


def launch(body, operands, pool, out, *, grid, interpret):
    """Run `body` on a grid of parts and rows; return its outputs, and the pool, written in place.

    `body` gets `operands`, the pool and the outputs as references; `out` is a pytree of shapes.
    """
    kernel = plgpu.kernel(
        body,
        kernel_name="conv_update",
        out_type=[out],
        grid=grid,
        grid_names=("part", "row"),  # the last part of all rows starts last
        # Safe without automatic barriers: a row reads other rows of the ring than it writes.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    pool = jax.new_ref(pool, memory_space=plgpu.GMEM)
    (out,) = kernel(*operands, pool)
    return out, jax.freeze(pool)


def _silu(x):
    """`x / (1 + exp(-x))`; the square of a reciprocal square root is cheaper than a division."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return x * (root * root)
