"""mamba2_inputs against NumPy in float64, and its kernel against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import REAL, ROWS, operands
from mamba2 import heads_of, projection

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.heads import Mamba2Heads, Mamba2Params
from jaxspec.pallas.mamba2.inputs import mamba2_inputs, mamba2_inputs_reference, split_tokens
from jaxspec.pallas.mamba2.inputs_kernel import mamba2_inputs_kernel

TINY = Mamba2Shape(4, 2, head_dim=5, state_dim=8)


def case(shape, dtype, width, spare=0, bias=True):
    """Projection, parameters and pool; columns that no op reads are NaN, and so is padding."""
    rng, heads = np.random.default_rng(width), heads_of(shape)
    x, weight, conv = operands(heads.channels, dtype, width, spare=spare)
    projected, params = projection(rng, heads, x, weight, bias=bias)
    return projected, params, conv


def check(projected, params, conv, run):
    """`run` is the reference: in real tokens, and bit for bit in the pool."""
    ours, after = run(projected, params, conv, 1, ROWS)
    reference = jax.jit(lambda x, conv: mamba2_inputs_reference(x, params, conv, 1, ROWS))
    expected, expected_after = reference(projected, conv)
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (after, expected_after)))
    rounding = max(2 * float(jnp.finfo(projected.dtype).eps), 5e-6)
    for name, mine, theirs in zip(ours._fields, ours, expected, strict=True):
        wanted_dtype = projected.dtype if name in "xbc" else jnp.float32
        assert mine.dtype == wanted_dtype and mine.shape == theirs.shape
        tolerance = rounding if name in "xbc" else 2e-6
        mine, theirs = (np.asarray(y, np.float32) for y in (mine, theirs))
        if name in "ad":
            np.testing.assert_allclose(mine, theirs, rtol=tolerance)
            continue
        for row, count in REAL.items():
            got, wanted = mine[row, :count], theirs[row, :count]
            assert np.isnan(wanted).all() == (row == 1)
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance / 2)


def test_the_reference_is_the_published_formula():
    """A whole history from zeros, in float64: silu(conv + bias), softplus(dt + bias), no clamp."""
    rng, heads, taps, tokens = np.random.default_rng(0), Mamba2Heads(4, 5, 2, 8), 4, 6
    x = rng.normal(size=(1, tokens, heads.columns + 3))
    x[..., heads.steps_column] = -30  # a step far below any published limit
    weight, bias = rng.normal(size=(taps, heads.channels)), rng.normal(size=heads.channels)
    rates = rng.normal(size=(heads.heads, 3))
    params = Mamba2Params(*(jnp.asarray(y, jnp.float32) for y in (weight, bias, rates)), heads)
    conv = jnp.zeros((1, 2, taps - 1 + tokens, heads.channels))
    rows = jax.tree.map(lambda y: y[:1], ROWS).replace(
        slots=jnp.int32([1]), num_computed=jnp.int32([0]), query_len=jnp.int32([tokens])
    )
    got, _ = mamba2_inputs_reference(jnp.asarray(x, jnp.float32), params, conv, 0, rows)

    padded = np.concatenate([np.zeros((taps - 1, heads.channels)), x[0, :, : heads.channels]])
    y = sum(padded[tap : tap + tokens] * weight[tap] for tap in range(taps)) + bias
    y = y / (1 + np.exp(-y))
    steps = x[0, :, heads.steps_column :][:, : heads.heads]
    for name, columns, shape in (("x", y[:, :20], (4, 5)), ("b", y[:, 20:36], (2, 8))):
        np.testing.assert_allclose(getattr(got, name)[0], columns.reshape(-1, *shape), atol=1e-5)
    np.testing.assert_allclose(got.c[0], y[:, 36:].reshape(-1, 2, 8), atol=1e-5)
    np.testing.assert_allclose(got.dt[0], np.log1p(np.exp(steps + rates[:, 1])), rtol=1e-5)
    assert 0 < got.dt[0, 0, 0] < 1e-11
    np.testing.assert_allclose(got.a, -np.exp(rates[:, 0]), rtol=1e-6)
    np.testing.assert_allclose(got.d, rates[:, 2], rtol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_the_op_is_the_convolution_its_heads_and_the_steps(bias):
    check(*case(TINY, jnp.float32, 3, bias=bias), mamba2_inputs)


def test_x_b_and_c_keep_the_dtype_of_the_projection():
    check(*case(TINY, jnp.bfloat16, 2), mamba2_inputs)


def test_prompts_have_the_tokens_of_a_rectangle():
    """`split_tokens` takes flat tokens as well."""
    projected, params, _ = case(TINY, jnp.float32, 3)
    heads = params.heads
    y, steps = projected[..., : heads.channels], projected[..., heads.steps_column : heads.columns]
    flat = split_tokens(y.reshape(-1, y.shape[2]), steps.reshape(-1, heads.heads), params)
    for name, part in split_tokens(y, steps, params)._asdict().items():
        np.testing.assert_array_equal(getattr(flat, name), part.reshape(getattr(flat, name).shape))


def test_a_part_of_a_projection_is_refused():
    projected, params, conv = case(TINY, jnp.float32, 3)
    with pytest.raises(ValueError, match="76 in all, but this one has 52"):
        mamba2_inputs(projected[..., :52], params, conv, 1, ROWS)


def test_taps_of_other_channels_are_refused():
    projected, params, conv = case(TINY, jnp.float32, 3)
    wrong = params.replace(conv=params.conv[:, :-1])
    with pytest.raises(ValueError, match="has 52 channels, but the taps are for 51"):
        mamba2_inputs(projected, wrong, conv, 1, ROWS)


@pytest.mark.parametrize(
    ("shape", "dtype", "width", "spare", "bias"),
    [
        (Mamba2Shape(8, 2), jnp.bfloat16, 4, 0, True),
        (Mamba2Shape(16, 1, head_dim=80), jnp.bfloat16, 1, 3, True),  # B and C in blocks of 128
        (Mamba2Shape(8, 1, state_dim=256), jnp.float16, 2, 1, False),
        (Mamba2Shape(48, 1), jnp.float32, 9, 0, True),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, shape, dtype, width, spare, bias
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(projected, params, conv, layer, rows):
        on_device = jnp.int32(layer)
        return mamba2_inputs_kernel(projected, params, conv, on_device, rows, interpret=interpreter)

    check(*case(shape, dtype, width, spare=spare, bias=bias), run)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [*MAMBA2.values(), Mamba2Shape(128, 8, head_dim=80)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width):
    dispatch._chosen.pop("mamba2_inputs", None)
    check(*case(shape, dtype, width), mamba2_inputs)
    assert dispatch.implementations()["mamba2_inputs"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_channels_no_kernel_takes_are_seen_to_run_the_reference():
    dispatch._chosen.pop("mamba2_inputs", None)
    check(*case(TINY, jnp.float32, 2), mamba2_inputs)
    (implementation,) = dispatch.implementations()["mamba2_inputs"]
    assert implementation == "XLA: 20 channels of x and 16 of B, not multiples of 256 and 128"
