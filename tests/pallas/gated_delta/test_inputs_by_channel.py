"""gdn_inputs_by_channel: the op and its kernel against their reference, with padding and NaN."""

import re

import convolution
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import REAL, ROWS
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import KDA
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import ChannelParams, GdnHeads
from jaxspec.pallas.gated_delta.inputs import (
    gdn_inputs_by_channel,
    gdn_inputs_by_channel_reference,
)
from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_by_channel_kernel
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes
HEADS = GdnHeads(32, 128, 32)  # of Kimi-Linear-48B and Ling-3.0
SPARE = 5  # columns between the channels and b


def operands(heads, dtype, width, lower_bound=None, spare=0):
    """Projection, input of the decays, parameters and pool."""
    channels = 3 * heads.value_heads * heads.key_dim
    x, taps, conv = convolution.operands(channels, dtype, width, spare=spare)
    rng, values = np.random.default_rng(width), (heads.value_heads, heads.key_dim)
    rest = rng.normal(size=(*x.shape[:2], SPARE + heads.value_heads + 3))
    projected = jnp.concatenate([x, jnp.asarray(rest, dtype)], axis=2)
    f = jnp.asarray(4 * rng.normal(size=(*x.shape[:2], channels // 3)), dtype)
    log_rate, bias = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in (values[:1], values)
    )
    params = ChannelParams(taps, log_rate, bias, lower_bound, heads, channels + SPARE)
    return projected, f, params, conv


def check(run, heads, dtype, width, lower_bound=None, **options):
    """`run` is the reference: in real tokens, and bit for bit in the pool."""
    projected, f, params, conv = operands(heads, dtype, width, lower_bound, **options)
    ours, after = run(projected, f, params, conv, 1, ROWS)
    reference = jax.jit(
        lambda x, f, conv: gdn_inputs_by_channel_reference(x, f, params, conv, 1, ROWS)
    )
    expected, expected_after = reference(projected, f, conv)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (after, expected_after)))
    # In 16 bits the convolution may round to a neighbour, and the length of heads with it.
    loose = max(4 * float(jnp.finfo(dtype).eps), 2e-5)
    for name, mine, theirs in zip(ours._fields, ours, expected, strict=True):
        assert mine.dtype == jnp.float32 and mine.shape == theirs.shape
        rtol, atol = (loose, loose / 10) if name in "qkv" else (1e-5, 1e-30)
        for row, count in REAL.items():
            got, wanted = (np.asarray(x)[row, :count] for x in (mine, theirs))
            assert np.isnan(wanted).all() == (row == 1 and name in "qkv")
            np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_op_is_the_convolution_its_heads_and_the_decays(lower_bound):
    check(gdn_inputs_by_channel, GdnHeads(2, 8, 2), jnp.float32, 3, lower_bound)


@pytest.mark.parametrize(
    ("heads", "dtype", "width", "lower_bound", "spare"),
    [
        (GdnHeads(4, 128, 4), jnp.bfloat16, 4, None, 0),
        (GdnHeads(8, 128, 8), jnp.float32, 1, -5.0, 3),
        (GdnHeads(8, 64, 8), jnp.float16, 2, None, 1),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, heads, dtype, width, lower_bound, spare
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(projected, f, params, conv, layer, rows):
        taps, log_rate, bias, *static = params
        arrays = projected, f, taps, log_rate, bias, conv, jnp.int32(layer), rows
        return gdn_inputs_by_channel_kernel(*arrays, *static, interpret=interpreter)

    check(run, heads, dtype, width, lower_bound, spare=spare)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(dtype, width, lower_bound):
    name = gdn_inputs_by_channel.__name__
    dispatch._chosen.pop(name, None)
    check(gdn_inputs_by_channel, HEADS, dtype, width, lower_bound)
    assert dispatch.implementations()[name] == ("kernel",)


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_kernel_compiles(h200, monkeypatch, capfd, dtype, width):
    """And reads the projection in place; its columns are those of Kimi-Linear-48B."""
    shape = KDA["kimi-linear-48b-a3b"]
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)
    num_rows, channels = 4, shape.conv_dim
    static = None, heads, channels + 2 * 128

    def step(projected, f, taps, log_rate, bias, conv, rows):
        outputs = []
        for layer in range(2):
            arrays = projected, f, taps, log_rate, bias, conv, jnp.int32(layer), rows
            tokens, conv = gdn_inputs_by_channel_kernel(*arrays, *static)
            outputs.append(tokens)
        return outputs, conv

    projected = array(num_rows, width, 12608, dtype=dtype)
    taps, pool = array(4, channels, dtype=dtype), array(2, 65, 12, channels, dtype=dtype)
    f = array(num_rows, width, channels // 3, dtype=dtype)
    decay = array(heads.value_heads), array(heads.value_heads, heads.key_dim)
    rows = DecodeRegion(*[array(num_rows, dtype=jnp.int32)] * 5)
    arrays = (projected, f, taps, *decay, pool, rows)
    compiled = compile_for(h200, monkeypatch, step, arrays, donated=5)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert not re.findall(r"(slice|fusion)\(", compiled.as_text())  # no columns cut out
