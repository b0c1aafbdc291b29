"""gdn_inputs_by_channel: the op and its kernel against their reference, with padding and NaN."""

import re

import convolution
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import REAL, ROWS
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import ChannelParams, GdnHeads
from jaxspec.pallas.gated_delta.inputs import (
    gdn_inputs_by_channel,
    gdn_inputs_by_channel_reference,
    why_not_load_decays,
)
from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_by_channel_kernel
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes
HEADS = GdnHeads(32, 128, 32)  # of Kimi-Linear-48B and Ling-3.0
OTHERS = 5  # columns between the channels and b, which nothing reads


def operands(heads, dtype, width, lower_bound=None, spare=0):
    """Projection, inputs of the decays, parameters and pool, whose window has `spare` inputs more.

    Only a decay without bound has an array of inputs; others are columns of the projection.
    """
    channels = 3 * heads.value_heads * heads.key_dim
    x, taps, conv = convolution.operands(channels, dtype, width, spare=spare)
    rng, values = np.random.default_rng(width), (heads.value_heads, heads.key_dim)
    columns = [OTHERS, heads.value_heads, 4 - OTHERS % 4, channels // 3, 4]
    others, b, gap, f, rest = (
        jnp.asarray(4 * rng.normal(size=(*x.shape[:2], count)), dtype) for count in columns
    )
    projected = jnp.concatenate([x, others, b, gap, f, rest], axis=2)
    b_column, f_column = channels + OTHERS, 0
    if lower_bound is not None:
        f, f_column = projected, b_column + heads.value_heads + gap.shape[2]
    log_rate, bias = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in (values[:1], values)
    )
    params = ChannelParams(taps, log_rate, bias, lower_bound, heads, f_column, b_column)
    return projected, f, params, conv


def check(run, heads, dtype, width, lower_bound=None, **options):
    """Compare `run` with the reference: real tokens, and the pool bit for bit."""
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


def kernel(projected, f, params, conv, layer, rows, **options):
    return gdn_inputs_by_channel_kernel(
        *(projected, f, params.conv, (params.log_rate, params.bias), conv),
        *(jnp.int32(layer), rows, params.heads),
        f_column=params.f_column,
        b_column=params.b_column,
        lower_bound=params.lower_bound,
        **options,
    )


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
        return kernel(projected, f, params, conv, layer, rows, interpret=interpreter)

    check(run, heads, dtype, width, lower_bound, spare=spare)
    assert not get_races().races_found


@pytest.mark.parametrize(
    ("columns", "heads", "message"),
    [
        (52, GdnHeads(2, 8, 2), "needs at least 55 columns for 2 heads, got 52"),
        (90, GdnHeads(1, 8, 2), "as many heads of keys as of values, got 1 and 2"),
    ],
)
def test_arrays_without_the_columns_are_refused(columns, heads, message):
    projected, f, params, conv = operands(GdnHeads(2, 8, 2), jnp.float32, 1)
    params = params._replace(heads=heads)
    with pytest.raises(ValueError, match=message):
        gdn_inputs_by_channel(projected[..., :columns], f, params, conv, 1, ROWS)


@pytest.mark.parametrize(
    ("columns", "first", "why"),
    [
        (516, 4, None),
        (516, 1, "f from column 1 of 516, not both multiples of 4"),
        (517, 4, "f from column 4 of 517, not both multiples of 4"),
    ],
)
def test_the_kernel_declines_decays_that_it_cannot_load_by_four(columns, first, why):
    *_, params, _ = operands(GdnHeads(4, 128, 4), jnp.float32, 1)
    params = params._replace(f_column=first)
    assert why_not_load_decays(jnp.zeros((4, 1, columns)), params) == why


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
@pytest.mark.parametrize("lower_bound", [None, -5.0])  # Kimi-Linear; Ling-3.0
def test_the_kernel_compiles_and_reads_its_arrays_in_place(
    h200, monkeypatch, capfd, lower_bound, dtype, width
):
    num_rows, values = 4, HEADS.value_heads * HEADS.key_dim
    channels, is_column = 3 * values, lower_bound is not None
    columns = {"f_column": 0, "b_column": channels + 2 * 128}
    if is_column:
        columns = {"f_column": channels + values, "b_column": channels + 2 * values}

    def step(projected, f, taps, log_rate, bias, conv, rows):
        params = ChannelParams(taps, log_rate, bias, lower_bound, HEADS, **columns)
        f = projected if is_column else f
        outputs = []
        for layer in range(2):
            tokens, conv = kernel(projected, f, params, conv, layer, rows)
            outputs.append(tokens)
        return outputs, conv

    projected = array(num_rows, width, columns["b_column"] + 64, dtype=dtype)
    taps, pool = array(4, channels, dtype=dtype), array(2, 65, 12, channels, dtype=dtype)
    f = array(num_rows, width, values, dtype=dtype)
    decay = array(HEADS.value_heads), array(HEADS.value_heads, HEADS.key_dim)
    rows = DecodeRegion(*[array(num_rows, dtype=jnp.int32)] * 5)
    arrays = (projected, f, taps, *decay, pool, rows)
    compiled = compile_for(h200, monkeypatch, step, arrays, donated=5)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert not re.findall(r"(slice|fusion)\(", compiled.as_text())  # no columns cut out
