"""Pallas (Mosaic GPU) kernels of the ops in `inputs` for Hopper GPUs."""

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
    channel_gates_in_kernel,
    gates_column,
    gates_in_kernel,
)
from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.recurrent import conv_update_kernel, kernel_math
from jaxspec.pallas.recurrent.conv_update_kernel import ConvOperands


@functools.partial(jax.jit, static_argnames=("heads", "interpret"))
def gdn_inputs_kernel(projected, taps, decay, pool, layer, rows, heads, *, interpret=None):
    """Run `gdn_inputs`; `pool` is that of the convolution.

    Each block computes `BLOCK_CHANNELS` channels of one row, which are whole heads; the last block
    of a row computes its gates.
    """
    first = gates_column(pool.shape[3], heads)

    def put_gates(_, x, decay, out):
        _put_gates(x, first, decay, out)

    return _launch(
        projected,
        decay,
        ConvOperands.of(taps, layer, rows),
        pool,
        heads,
        log_decays=_float32(projected, heads.value_heads),
        put_gates=put_gates,
        gate_blocks=1,
        interpret=interpret,
    )


@functools.partial(
    jax.jit, static_argnames=("heads", "f_column", "b_column", "lower_bound", "interpret")
)
def gdn_inputs_by_channel_kernel(
    projected,
    f,
    taps,
    decay,
    pool,
    layer,
    rows,
    heads,
    *,
    f_column,
    b_column,
    lower_bound=None,
    interpret=None,
):
    """Run `gdn_inputs_by_channel`, as `gdn_inputs_kernel` runs its op.

    `decay` has the log rates and the biases. The last blocks of a row compute `BLOCK_CHANNELS` log
    decays each.
    """

    def put_gates(block, x, gates, out):
        _put_log_decays(block, gates, f_column, lower_bound, out)

        @pl.when(block == 0)
        def _():
            _put_strengths(x, b_column, out)

    return _launch(
        projected,
        (f, *decay),
        ConvOperands.of(taps, layer, rows),
        pool,
        heads,
        log_decays=_float32(projected, heads.value_heads, heads.key_dim),
        put_gates=put_gates,
        gate_blocks=heads.value_heads * heads.key_dim // BLOCK_CHANNELS,
        interpret=interpret,
    )


def _float32(projected, *dims) -> Any:
    return jax.ShapeDtypeStruct((*projected.shape[:2], *dims), jnp.float32)


def _launch(projected, gates, conv, pool, heads, *, log_decays, put_gates, gate_blocks, interpret):
    """Return the tokens, whose log decays have the shape of `log_decays`, and the pool.

    The last `gate_blocks` blocks of a row call `put_gates(block, x, gates, out)`, with references
    to the arrays of `gates`.
    """
    key_heads, key_dim, value_heads = heads
    num_rows, width, _ = projected.shape
    size, blocks = BLOCK_CHANNELS // key_dim, pool.shape[3] // BLOCK_CHANNELS

    def body(x, gates, conv, pool, out):
        row, part = lax.axis_index("row"), lax.axis_index("part")

        @pl.when(part < blocks)
        def _():
            layout = _layout(key_dim)
            block = pl.ds(part * BLOCK_CHANNELS, BLOCK_CHANNELS)
            # A token's first column is not at a multiple of the head size, so only the block's
            # columns are reshaped into heads.
            new = [x.at[row, t, block].reshape(size, key_dim) for t in range(width)]
            new = [access.load(token, layout) for token in new]
            put = functools.partial(_put_heads, out, x.dtype)
            own_heads = pl.ds(part * size, size)
            conv_update_kernel.convolve(new, conv, pool, own_heads, layout, put)

        @pl.when(part >= blocks)
        def _():
            put_gates(part - blocks, x, gates, out)

    key, value = (_float32(projected, count, key_dim) for count in (key_heads, value_heads))
    taps, pool_in_heads = (
        a.reshape(*a.shape[:-1], a.shape[-1] // key_dim, key_dim) for a in (conv.taps, pool)
    )
    tokens, after = conv_update_kernel.launch(
        body,
        (projected, gates, conv._replace(taps=taps)),
        pool_in_heads,
        GdnTokens(q=key, k=key, v=value, g=log_decays, beta=_float32(projected, value_heads)),
        grid=(blocks + gate_blocks, num_rows),
        interpret=interpret,
    )
    return tokens, after.reshape(pool.shape)


def _layout(key_dim):
    # Four channels per thread: a head of 128 is within one warp, so no sum crosses warps.
    return layouts.row_layout(key_dim, itemsize=4, most_lanes=32)


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


def _put_log_decays(block, gates, f_column, lower_bound, out):
    """Write the log decays of a block's channels."""

    f, log_rate, bias = gates
    row, (width, _, key_dim) = lax.axis_index("row"), out.g.shape[1:]
    size, layout = BLOCK_CHANNELS // key_dim, _layout(key_dim)
    own_heads = pl.ds(block * size, size)
    columns = pl.ds(f_column + block * BLOCK_CHANNELS, BLOCK_CHANNELS)
    inputs = [
        access.load(f.at[row, t, columns].reshape(size, key_dim), layout) for t in range(width)
    ]
    rate = kernel_math.exp(access.load(log_rate.at[own_heads], layout.reduce(1)))
    rate = lax.broadcast_in_dim(rate, (size, key_dim), (0,))
    shift = access.load(bias.at[own_heads], layout)
    for t, x in enumerate(inputs):
        g = channel_gates_in_kernel(x.astype(jnp.float32) + shift, rate, lower_bound)
        access.store(out.g.at[row, t, own_heads], g)


def _put_strengths(x, first, out):
    """Write the write strengths of a row's tokens; in `x`, `b` starts at column `first`."""

    row, (width, heads) = lax.axis_index("row"), out.beta.shape[1:]
    layout = layouts.lane_layout(heads)
    for t in range(width):
        b = access.load(x.at[row, t, pl.ds(first, heads)], layout).astype(jnp.float32)
        access.store(out.beta.at[row, t], kernel_math.sigmoid(b))
