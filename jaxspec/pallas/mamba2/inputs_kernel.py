"""Kernel of `mamba2_inputs` (Pallas, Mosaic GPU)."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.mamba2.heads import BLOCK_CHANNELS, Mamba2Heads, Mamba2Tokens, key_block
from jaxspec.pallas.recurrent import conv_update_kernel, kernel_math
from jaxspec.pallas.recurrent.conv_update_kernel import ConvOperands


class _Segment(NamedTuple):
    """Channels of x, of B or of C, split into blocks."""

    first: int  # first channel
    size: int  # number of channels in a block
    first_part: int  # first part of the grid
    parts: int


@functools.partial(jax.jit, static_argnames="interpret")
def mamba2_inputs_kernel(projected, params, pool, layer, rows, *, interpret=None):
    """Run `mamba2_inputs`; `pool` is the convolution's.

    A block computes a range of one row's channels, all of x, of B or of C; the last block of a row
    computes its step sizes.
    """
    heads: Mamba2Heads = params.heads
    num_rows, width, _ = projected.shape
    segments = _segments(heads)
    parts = segments[-1].first_part + segments[-1].parts

    def body(x, rates, conv, pool, out):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        for segment, target in zip(segments, (out.x, out.b, out.c), strict=True):
            end = segment.first_part + segment.parts

            @pl.when((part >= segment.first_part) & (part < end))
            def _(segment=segment, target=target):
                start = (part - segment.first_part) * segment.size
                block = pl.ds(segment.first + start, segment.size)
                layout = layouts.vectors(segment.size // device.THREADS)

                def put(t, y):
                    own = target.at[row, t, pl.ds(start, segment.size)]
                    access.store(own, y.astype(target.dtype))

                new = [access.load(x.at[row, t, block], layout) for t in range(width)]
                conv_update_kernel.convolve(new, conv, pool, block, layout, put)

        @pl.when(part == parts)
        def _():
            _put_steps(x, heads, rates, out)

    def array(*dims, dtype=projected.dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    keys, of_head = heads.groups * heads.state_dim, array(heads.heads, dtype=jnp.float32)
    tokens, after = conv_update_kernel.launch(
        body,
        (projected, params.rates, ConvOperands.of(params.conv, layer, rows, params.bias)),
        pool,
        Mamba2Tokens(
            x=array(num_rows, width, heads.features),
            dt=array(num_rows, width, heads.heads, dtype=jnp.float32),
            a=of_head,
            b=array(num_rows, width, keys),
            c=array(num_rows, width, keys),
            d=of_head,
        ),
        grid=(parts + 1, num_rows),
        interpret=interpret,
    )
    x = tokens.x.reshape(num_rows, width, heads.heads, heads.head_dim)
    by_group = num_rows, width, heads.groups, heads.state_dim
    b, c = (y.reshape(by_group) for y in (tokens.b, tokens.c))
    return tokens._replace(x=x, b=b, c=c), after


def _segments(heads):
    keys, found, channel, part = heads.groups * heads.state_dim, [], 0, 0
    for channels, size in ((heads.features, BLOCK_CHANNELS), *[(keys, key_block(heads))] * 2):
        found.append(_Segment(channel, size, part, channels // size))
        channel, part = channel + channels, part + channels // size
    return found


def _put_steps(x, heads, rates, out):
    """Write a row's `dt`; the first row's block writes `A` and `D` as well."""
    row, width = lax.axis_index("row"), x.shape[1]
    layout = layouts.lane_layout(heads.heads)

    def load(ref):
        return access.load(ref, layout).astype(jnp.float32)

    columns = pl.ds(heads.steps_column, heads.heads)
    steps = [load(x.at[row, t, columns]) for t in range(width)]
    a_log, dt_bias, d = (load(rates.at[:, column]) for column in range(3))
    for t, step in enumerate(steps):
        access.store(out.dt.at[row, t], kernel_math.softplus(step + dt_bias))

    @pl.when(row == 0)
    def _():
        access.store(out.a, -kernel_math.exp(a_log))
        access.store(out.d, d)
