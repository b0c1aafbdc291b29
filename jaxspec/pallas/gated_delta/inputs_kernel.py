"""Pallas (Mosaic GPU) kernel of `gdn_inputs` for Hopper GPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxspec.pallas.gated_delta.heads import (
    BLOCK_CHANNELS,
    EPS,
    GdnTokens,
    gates_column,
    gates_in_kernel,
)
from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.recurrent import conv_update_kernel
from jaxspec.pallas.recurrent.conv_update_kernel import ConvOperands


@functools.partial(jax.jit, static_argnames=("heads", "interpret"))
def gdn_inputs_kernel(projected, taps, decay, pool, layer, rows, heads, *, interpret=None):
    """Run `gdn_inputs`; `pool` is that of the convolution.

    Each block computes `BLOCK_CHANNELS` channels of one row, which are whole heads; the last block
    of a row computes its gates.
    """

    key_heads, key_dim, value_heads = heads
    num_rows, width, _ = projected.shape
    channels = pool.shape[3]
    first = gates_column(channels, heads)
    size, blocks = BLOCK_CHANNELS // key_dim, channels // BLOCK_CHANNELS

    def body(x, decay, conv, pool, out):
        row, part = lax.axis_index("row"), lax.axis_index("part")

        @pl.when(part < blocks)
        def _():
            # Four channels per thread: a head of 128 is within one warp, so no sum crosses warps.
            layout = layouts.row_layout(key_dim, itemsize=4, most_lanes=32)
            block = pl.ds(part * BLOCK_CHANNELS, BLOCK_CHANNELS)
            # A token's first column is not at a multiple of the head size, so only the block's
            # columns are reshaped into heads.
            new = [x.at[row, t, block].reshape(size, key_dim) for t in range(width)]
            new = [access.load(token, layout) for token in new]
            put = functools.partial(_put_heads, out, x.dtype)
            own_heads = pl.ds(part * size, size)
            conv_update_kernel.convolve(new, conv, pool, own_heads, layout, put)

        @pl.when(part == blocks)
        def _():
            _put_gates(x, first, decay, out)

    def array(*dims) -> Any:
        return jax.ShapeDtypeStruct((num_rows, width, *dims), jnp.float32)

    key, value, gate = array(key_heads, key_dim), array(value_heads, key_dim), array(value_heads)
    taps, pool_in_heads = (
        a.reshape(*a.shape[:-1], a.shape[-1] // key_dim, key_dim) for a in (taps, pool)
    )
    tokens, after = conv_update_kernel.launch(
        body,
        (projected, decay, ConvOperands.of(taps, layer, rows)),
        pool_in_heads,
        GdnTokens(q=key, k=key, v=value, g=gate, beta=gate),
        grid=(blocks + 1, num_rows),
        interpret=interpret,
    )
    return tokens, after.reshape(pool.shape)


def _put_heads(out, dtype, t, y):
    """Write `y`, the convolution of a block's heads at token `t`, to queries, keys or values."""

    row, part = lax.axis_index("row"), lax.axis_index("part")
    size, key_dim = y.shape
    key_blocks = out.k.shape[2] // size
    y = y.astype(dtype).astype(jnp.float32)  # rounded as in `conv_update`

    def write(ref, first, values):
        block = pl.ds((part - first) * size, size)
        access.store(ref.at[row, t, block], values)

    @pl.when(part < 2 * key_blocks)
    def _():
        scale = lax.rsqrt(jnp.sum(y * y, axis=1) + EPS)
        unit = y * lax.broadcast_in_dim(scale, y.shape, (0,))

        @pl.when(part < key_blocks)
        def _():
            write(out.q, 0, unit * key_dim**-0.5)

        @pl.when(part >= key_blocks)
        def _():
            write(out.k, key_blocks, unit)

    @pl.when(part >= 2 * key_blocks)
    def _():
        write(out.v, 2 * key_blocks, y)


def _put_gates(x, first, decay, out):
    """Write the gates of a row's tokens; in `x`, `b` starts at column `first`, followed by `a`."""

    row, (width, heads) = lax.axis_index("row"), out.g.shape[1:]
    layout = layouts.lane_layout(heads)

    def load(ref):
        return access.load(ref, layout).astype(jnp.float32)

    b = [load(x.at[row, t, pl.ds(first, heads)]) for t in range(width)]
    a = [load(x.at[row, t, pl.ds(first + heads, heads)]) for t in range(width)]
    log_rate, bias = (load(decay.at[:, column]) for column in range(2))
    for t in range(width):
        g, beta = gates_in_kernel(b[t], a[t], log_rate, bias)
        access.store(out.g.at[row, t], g)
        access.store(out.beta.at[row, t], beta)
