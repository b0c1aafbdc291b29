"""The cases of the convolution, alone and with what follows it; `kernel_cases.OPS` lists them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from case import INPUTS, Case, live_rows
from shapes import GDN

from jaxspec.pallas.conv_update import conv_update, conv_update_reference
from jaxspec.pallas.gdn_inputs import GdnHeads, gdn_inputs, gdn_inputs_reference


def conv_update_cases() -> Iterator[Case]:
    """As for `gdn_step`; bfloat16 is what the models are published in."""
    for model, shape, *sizes in _sizes():
        yield _case("conv_update", model, shape, *sizes)


def gdn_qkv_cases() -> Iterator[Case]:
    """As for `conv_update`, whose bytes it moves, but for outputs in float32."""
    for model, shape, *sizes in _sizes():
        yield _case("gdn_qkv", model, shape, *sizes)


def _sizes():
    sizes = [("bfloat16", rows, width) for width in (4, 1) for rows in (64, 256, 8, 1)]
    sizes += [("bfloat16", 64, 9), ("float32", 64, 4)]
    for model, shape in GDN.items():
        for dtype, rows, width in sizes:
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield model, shape, jnp.dtype(dtype), rows, width


def _case(op, model, shape, dtype, rows, width, kernel=4):
    channels, window = shape.conv_dim, kernel - 2 + width
    keys = jax.random.split(jax.random.key(0), INPUTS + 1)
    # Several, so that none is found in the cache.
    xs = tuple(jax.random.normal(key, (rows, width, channels)).astype(dtype) for key in keys[1:])
    taps = jax.random.normal(keys[0], (kernel, channels)).astype(dtype)
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)

    def pool(layers):
        one = jax.random.normal(keys[0], (window, channels)).astype(dtype)
        return jnp.broadcast_to(one, (layers, 1 + rows, window, channels)) + jnp.zeros((), dtype)

    def run_conv(convolve, pool, layer, xs, taps, *index):
        return convolve(xs[layer % INPUTS], taps.T, pool, layer, *index)

    def run_qkv(convolve, pool, layer, xs, taps, *index):
        *outputs, pool = convolve(xs[layer % INPUTS], taps.T, pool, layer, *index, heads)
        return outputs, pool

    if op == "gdn_qkv":
        run = functools.partial(run_qkv, gdn_qkv)
        reference = functools.partial(run_qkv, gdn_qkv_reference)
        output_bytes = 4 * xs[0].size
    else:
        run = functools.partial(run_conv, conv_update)
        reference = functools.partial(run_conv, conv_update_reference)
        output_bytes = xs[0].nbytes
    about = {"model": model, "channels": channels, "dtype": dtype.name}
    return Case(
        op=op,
        about={**about, "rows": rows, "width": width},
        run=run,
        reference=reference,
        pool=pool,
        layer_bytes=rows * window * channels * dtype.itemsize,
        operands=(xs, taps, *live_rows(rows, width)),
        total_bytes=xs[0].nbytes
        + output_bytes
        + taps.nbytes
        + rows * (kernel - 1 + window) * channels * dtype.itemsize,
    )
