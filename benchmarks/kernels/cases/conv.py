"""The cases of the convolution, alone and with what follows it; `table.OPS` lists them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import INPUTS, Case, filled, live_region
from benchmarks.measure.shapes import GDN
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams
from jaxspec.pallas.gated_delta.inputs import gdn_inputs, gdn_inputs_reference
from jaxspec.pallas.recurrent.conv_update import conv_update, conv_update_reference


def conv_update_cases() -> Iterator[Case]:
    """The sizes of `gdn_step`; bfloat16 is the dtype of the published models."""
    for model, shape, *sizes in _sizes():
        yield _case("conv_update", model, shape, *sizes)


def gdn_inputs_cases() -> Iterator[Case]:
    """The sizes of `conv_update`; it moves the same bytes, outputs in float32, and the gates."""
    for model, shape, *sizes in _sizes():
        yield _case("gdn_inputs", model, shape, *sizes)


def _sizes():
    sizes = [("bfloat16", rows, width) for width in (4, 1) for rows in (64, 256, 8, 1)]
    sizes += [("bfloat16", 64, 9), ("float32", 64, 4)]
    for model, shape in GDN.items():
        for dtype, rows, width in sizes:
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield model, shape, jnp.dtype(dtype), rows, width


def _case(op, model, shape, dtype, rows, width, kernel=4):
    channels, window = shape.conv_dim, kernel - 1 + width
    is_inputs = op == "gdn_inputs"
    gates = 2 * shape.value_heads if is_inputs else 0
    # `gdn_inputs` takes a whole projection, but does not read the output gate's columns.
    columns = channels + is_inputs * shape.value_heads * shape.value_dim + gates
    keys = jax.random.split(jax.random.key(0), INPUTS + 1)
    # Several inputs, so that none is found in the cache.
    xs = tuple(jax.random.normal(key, (rows, width, columns)).astype(dtype) for key in keys[1:])
    taps = jax.random.normal(keys[0], (kernel, channels)).astype(dtype)
    decay = jnp.zeros((shape.value_heads, 2))
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)

    def run_conv(convolve, pool, layer, xs, taps, decay, region):
        return convolve(xs[layer % INPUTS], taps, pool, layer, region)

    def run_inputs(inputs, pool, layer, xs, taps, decay, region):
        return inputs(xs[layer % INPUTS], GdnParams(taps, decay, heads), pool, layer, region)

    if is_inputs:
        run = functools.partial(run_inputs, gdn_inputs)
        reference = functools.partial(run_inputs, gdn_inputs_reference)
    else:
        run = functools.partial(run_conv, conv_update)
        reference = functools.partial(run_conv, conv_update_reference)
    output_bytes = 4 if is_inputs else dtype.itemsize
    about = {"model": model, "channels": channels, "dtype": dtype.name}
    return Case(
        op=op,
        about={**about, "rows": rows, "width": width},
        run=run,
        reference=reference,
        pool=lambda layers: filled(layers, rows, window, channels, dtype=dtype),
        layer_bytes=rows * window * channels * dtype.itemsize,
        operands=(xs, taps, decay, live_region(rows, width)),
        total_bytes=rows * width * (channels + gates) * (dtype.itemsize + output_bytes)
        + taps.nbytes
        + rows * window * channels * dtype.itemsize,  # read, and written
    )
