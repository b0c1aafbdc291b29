"""`gdn_inputs` on a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxspec.pallas.gated_delta import gates as gdn_gates
from jaxspec.pallas.gated_delta.heads import _CHANNELS, EPS, gates_column
from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.recurrent import conv_update_kernel


@functools.partial(jax.jit, static_argnames=("heads", "interpret"))
def gdn_inputs_kernel(
    x, taps, decay, conv, layer, slots, num_computed, query_len, heads, *, interpret=None
):
    """`gdn_inputs` on a Hopper GPU, with `taps` `[kernel, channels]`.

    A block has some whole heads of a row, and the last the row's gates. `interpret`: parameters of
    Mosaic's interpreter.
    """

    key_heads, key_dim, value_heads = heads
    rows, width, _ = x.shape
    first = gates_column(conv.shape[3], heads)
    size, blocks = _CHANNELS // key_dim, conv.shape[3] // _CHANNELS

    def body(x, decay, *refs):
        *operands, q, k, v, g, beta = refs
        row, part = lax.axis_index("row"), lax.axis_index("part")

        @pl.when(part < blocks)
        def _():
            # Four channels a thread: a head of 128 is one warp's, and its sum needs no other.
            layout = layouts.row_layout(key_dim, itemsize=4, most_lanes=32)
            channels = pl.ds(part * _CHANNELS, _CHANNELS)
            # Where a token begins is no multiple of a head: its columns are cut, not the whole.
            new = [x.at[row, t, channels].reshape(size, key_dim) for t in range(width)]
            new = [access.load(token, layout) for token in new]
            put = functools.partial(_put_heads, (q, k, v), x.dtype)
            conv_update_kernel.convolve(new, operands, pl.ds(part * size, size), layout, put)

        @pl.when(part == blocks)
        def _():
            _put_gates(x, first, decay, g, beta)

    of_keys = jax.ShapeDtypeStruct((rows, width, key_heads, key_dim), jnp.float32)
    of_values = jax.ShapeDtypeStruct((rows, width, value_heads, key_dim), jnp.float32)
    of_gates = jax.ShapeDtypeStruct((rows, width, value_heads), jnp.float32)
    taps, pool = (a.reshape(*a.shape[:-1], -1, key_dim) for a in (taps, conv))
    operands = x, decay, taps, layer[None], slots, num_computed, query_len
    outputs = of_keys, of_keys, of_values, of_gates, of_gates
    grid = blocks + 1, rows
    outputs, pool = conv_update_kernel.launch(body, operands, pool, outputs, grid, interpret)
    return *outputs, pool.reshape(conv.shape)


def _put_heads(outputs, dtype, t, y):
    """Write a block's heads of token `t`, the convolution's `y`, to queries, keys or values."""

    q, k, v = outputs
    row, part = lax.axis_index("row"), lax.axis_index("part")
    size, key_dim = y.shape
    key_blocks = k.shape[2] // size
    y = y.astype(dtype).astype(jnp.float32)  # as `conv_update` gives it

    def write(out, first, values):
        block = pl.ds((part - first) * size, size)
        access.store(out.at[row, t, block], values)

    @pl.when(part < 2 * key_blocks)
    def _():
        scale = lax.rsqrt(jnp.sum(y * y, axis=1) + EPS)
        unit = y * lax.broadcast_in_dim(scale, y.shape, (0,))

        @pl.when(part < key_blocks)
        def _():
            write(q, 0, unit * key_dim**-0.5)

        @pl.when(part >= key_blocks)
        def _():
            write(k, key_blocks, unit)

    @pl.when(part >= 2 * key_blocks)
    def _():
        write(v, 2 * key_blocks, y)


def _put_gates(x, first, decay, g, beta):
    """Write `gates` of a row's tokens, whose `b` and then `a` begin at column `first` of `x`."""

    row, (width, heads) = lax.axis_index("row"), g.shape[1:]
    layout = layouts.lane_layout(heads)

    def load(ref):
        return access.load(ref, layout).astype(jnp.float32)

    b = [load(x.at[row, t, pl.ds(first, heads)]) for t in range(width)]
    a = [load(x.at[row, t, pl.ds(first + heads, heads)]) for t in range(width)]
    of_decay = [load(decay.at[:, column]) for column in range(2)]
    for t in range(width):
        log_decay, strength = gdn_gates.in_kernel(b[t], a[t], *of_decay)
        access.store(g.at[row, t], log_decay)
        access.store(beta.at[row, t], strength)
