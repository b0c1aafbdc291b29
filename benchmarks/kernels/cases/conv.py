"""The cases of the convolution, alone and with what follows it; `table.OPS` lists them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import INPUTS, Case, about, filled, live_region
from benchmarks.measure.shapes import GDN, KDA, MAMBA2, Mamba2Shape
from jaxspec.pallas.gated_delta.heads import ChannelParams, GdnHeads, GdnParams
from jaxspec.pallas.gated_delta.inputs import (
    gdn_inputs,
    gdn_inputs_by_channel,
    gdn_inputs_by_channel_reference,
    gdn_inputs_reference,
)
from jaxspec.pallas.mamba2.heads import Mamba2Heads, Mamba2Params
from jaxspec.pallas.mamba2.inputs import mamba2_inputs, mamba2_inputs_reference
from jaxspec.pallas.recurrent.conv_update import conv_update, conv_update_reference


def conv_update_cases() -> Iterator[Case]:
    """The sizes of `gdn_step`; bfloat16 is the dtype of the published models."""
    for model, shape, *sizes in _sizes():
        yield _case("conv_update", model, shape, *sizes)


def gdn_inputs_cases() -> Iterator[Case]:
    """The sizes of `conv_update`; it moves the same bytes, outputs in float32, and the gates."""
    for model, shape, *sizes in _sizes():
        yield _case("gdn_inputs", model, shape, *sizes)


def gdn_inputs_by_channel_cases() -> Iterator[Case]:
    """Yield cases with the heads of Kimi-Linear-48B; of other columns the projection has b's."""
    model, dtype = "kimi-linear-48b-a3b", jnp.dtype("bfloat16")
    shape = KDA[model]
    channels, heads = shape.conv_dim, GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)
    values = heads.value_heads * heads.key_dim
    columns = channels + heads.value_heads
    for rows, width in ((64, 4), (64, 1), (8, 1), (1, 1)):
        window = 3 + width
        keys = jax.random.split(jax.random.key(0), 1 + 2 * INPUTS)
        # Several inputs, so that none is found in the cache.
        xs, fs = (
            tuple(jax.random.normal(key, (rows, width, size)).astype(dtype) for key in some)
            for size, some in ((columns, keys[1::2]), (values, keys[2::2]))
        )
        taps = jax.random.normal(keys[0], (4, channels)).astype(dtype)
        decay = jnp.zeros(heads.value_heads), jnp.zeros((heads.value_heads, heads.key_dim))

        def run(inputs, pool, layer, xs, fs, taps, decay, region):
            params = ChannelParams(taps, *decay, None, heads, 0, channels)
            at = layer % INPUTS
            return inputs(xs[at], fs[at], params, pool, layer, region)

        yield Case(
            op="gdn_inputs_by_channel",
            about={"model": model, "dtype": dtype.name, "rows": rows, "width": width},
            run=functools.partial(run, gdn_inputs_by_channel),
            reference=functools.partial(run, gdn_inputs_by_channel_reference),
            pool=lambda layers, rows=rows, window=window: filled(
                layers, rows, window, channels, dtype=dtype
            ),
            layer_bytes=rows * window * channels * dtype.itemsize,
            operands=(xs, fs, taps, decay, live_region(rows, width)),
            total_bytes=rows * width * (columns + values) * (dtype.itemsize + 4)
            + taps.nbytes
            + rows * window * channels * dtype.itemsize,  # read, and written
        )


def mamba2_inputs_cases() -> Iterator[Case]:
    """From a projection with its bias on: Nemotron-3-Nano, and other models at few sizes."""
    for model, rows, widths in MAMBA2_SIZES:
        for width in widths:
            yield _mamba2_case(model, rows, width)


# Models, rows and widths at which ops that take a projection of Mamba2 are measured.
MAMBA2_SIZES = [
    *(("nemotron-3-nano", rows, (4, 1)) for rows in (64, 8, 1)),
    ("nemotron-h-8b", 64, (4,)),
    *(("mamba2-2.7b", rows, (1,)) for rows in (64, 1)),
]


def mamba2_params(shape: Mamba2Shape, kernel: int = 4) -> Mamba2Params:
    """Parameters of a layer in bfloat16, whose steps decay as fast as a model's."""
    keys = jax.random.split(jax.random.key(0), 2)
    return Mamba2Params(
        conv=jax.random.normal(keys[0], (kernel, shape.conv_dim)).astype(jnp.bfloat16),
        bias=jax.random.normal(keys[1], (shape.conv_dim,)).astype(jnp.bfloat16),
        rates=jnp.broadcast_to(jnp.asarray([1.0, -3.0, 1.0]), (shape.heads, 3)) + jnp.zeros(()),
        heads=Mamba2Heads(shape.heads, shape.head_dim, shape.groups, shape.state_dim),
    )


def mamba2_projections(shape: Mamba2Shape, rows: int, width: int) -> tuple[jax.Array, ...]:
    """Several projections, so that none is found in the cache."""
    keys, size = jax.random.split(jax.random.key(1), INPUTS), (rows, width, shape.projected)
    return tuple(jax.random.normal(key, size).astype(jnp.bfloat16) for key in keys)


def _mamba2_case(model, rows, width, kernel=4):
    shape, window, dtype = MAMBA2[model], kernel - 1 + width, jnp.dtype("bfloat16")
    channels, tokens = shape.conv_dim, rows * width
    params, xs = mamba2_params(shape, kernel), mamba2_projections(shape, rows, width)

    def run(op, pool, layer, xs, params, region):
        return op(xs[layer % INPUTS], params, pool, layer, region)

    return Case(
        op="mamba2_inputs",
        about=about(model, shape, dtype, channels=channels, rows=rows, width=width),
        run=functools.partial(run, mamba2_inputs),
        reference=functools.partial(run, mamba2_inputs_reference),
        pool=lambda layers: filled(layers, rows, window, channels, dtype=dtype),
        layer_bytes=rows * window * channels * dtype.itemsize,
        operands=(xs, params, live_region(rows, width)),
        total_bytes=2 * tokens * channels * dtype.itemsize  # read, and put out
        + tokens * shape.heads * (dtype.itemsize + 4)
        + sum(x.nbytes for x in jax.tree.leaves(params))
        + rows * window * channels * dtype.itemsize,  # read, and written
    )


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
    of_model = {"model": model, "channels": channels, "dtype": dtype.name}
    return Case(
        op=op,
        about={**of_model, "rows": rows, "width": width},
        run=run,
        reference=reference,
        pool=lambda layers: filled(layers, rows, window, channels, dtype=dtype),
        layer_bytes=rows * window * channels * dtype.itemsize,
        operands=(xs, taps, decay, live_region(rows, width)),
        total_bytes=rows * width * (channels + gates) * (dtype.itemsize + output_bytes)
        + taps.nbytes
        + rows * window * channels * dtype.itemsize,  # read, and written
    )
