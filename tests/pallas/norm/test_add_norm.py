"""add_norm against NumPy, and its kernel against the same, with one row of NaN among the rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measure.shapes import HIDDEN
from jaxspec.pallas import dispatch
from jaxspec.pallas.norm.add_norm import add_norm, add_norm_reference
from jaxspec.pallas.norm.add_norm_kernel import add_norm_kernel
from jaxspec.pallas.norm.rms_norm import Norm

EPS = 1e-6
NAN_ROW = 1


def operands(tokens, features, dtype, weight_dtype=None, *, zero_centred=True):
    """A residual stream, what is pending, and a norm."""
    rng = np.random.default_rng(features)
    stream, pending = rng.normal(size=(2, tokens, features))
    stream *= np.exp(rng.normal(size=(tokens, 1)))  # rows of any length
    pending[NAN_ROW : NAN_ROW + 1, features // 3] = np.nan
    weight = jnp.asarray(rng.normal(size=features), weight_dtype or dtype)
    norm = Norm(weight, EPS, zero_centred)
    return jnp.asarray(stream, dtype), jnp.asarray(pending, dtype), norm


def in_parts(pending, parts):
    """Float32 partial sums that make `pending`, up to a rounding of float32."""
    rng = np.random.default_rng(parts)
    sums = rng.normal(size=(parts, *pending.shape)).astype(np.float32)
    sums[-1] = np.asarray(pending, np.float32) - sums[:-1].sum(axis=0)
    return jnp.asarray(sums)


def oracle(stream, pending, norm):
    """The sum as the operands' dtype rounds it, and its norm, in float64."""
    if pending.ndim == 3:
        pending = jnp.asarray(np.asarray(pending).sum(axis=0), stream.dtype)
    total = np.asarray(stream, np.float64) + np.asarray(pending, np.float64)
    total = total.astype(stream.dtype)
    wide = total.astype(np.float64)
    root = np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS)
    return total, wide / root * (np.asarray(norm.weight, np.float64) + norm.zero_centred)


def check(stream, pending, norm, run):
    """`run` gives the sum bit for bit and the norm up to a rounding; only `NAN_ROW` is NaN."""
    total, normed = run(stream, pending, norm)
    expected_total, expected = oracle(stream, pending, norm)
    assert total.dtype == normed.dtype == stream.dtype
    assert total.shape == normed.shape == stream.shape
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (total, expected_total)))
    nan = np.isnan(np.asarray(normed, np.float32)).all(axis=1)
    np.testing.assert_array_equal(nan, np.arange(len(stream)) == NAN_ROW)
    tolerance = max(float(jnp.finfo(stream.dtype).eps) / 2 * 1.01, 1e-6)
    got = np.asarray(normed, np.float64)
    np.testing.assert_allclose(got[~nan], expected[~nan], rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("op", [add_norm, add_norm_reference])
def test_where_nothing_is_pending_the_norm_is_of_the_stream(op):
    stream, _, norm = operands(5, 24, jnp.bfloat16)
    total, normed = op(stream, None, norm)
    assert total is stream
    np.testing.assert_array_equal(*(np.float32(a) for a in (normed, norm(stream))))


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_norm_is_of_the_rounded_sum(dtype, zero_centred):
    check(*operands(5, 24, dtype, zero_centred=zero_centred), add_norm)


@pytest.mark.parametrize("parts", [1, 4])
def test_parts_are_summed_and_rounded_first(parts):
    stream, pending, norm = operands(5, 24, jnp.bfloat16)
    check(stream, in_parts(pending, parts), norm, add_norm)


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("tokens", "features", "dtype", "weight_dtype", "parts"),
    [
        (3, 1024, jnp.bfloat16, None, 0),
        (1, 2560, jnp.bfloat16, None, 0),  # accesses of 8 bytes
        (2, 2688, jnp.bfloat16, None, 3),  # those, and some of 2 bytes
        (2, 512, jnp.float32, None, 0),
        (2, 2048, jnp.float16, jnp.float32, 0),
        (3, 1024, jnp.bfloat16, None, 4),
    ],
)
@pytest.mark.parametrize("zero_centred", [False, True])
def test_the_kernel_equals_the_oracle_without_races(
    tokens, features, dtype, weight_dtype, parts, zero_centred
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def run(stream, pending, norm):
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        return add_norm_kernel(stream, pending, norm, interpret=interpret)

    case = operands(tokens, features, dtype, weight_dtype, zero_centred=zero_centred)
    stream, pending, norm = case
    check(stream, in_parts(pending, parts) if parts else pending, norm, run)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 256, 8192])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("features", [2688, *HIDDEN.values()])
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(features, dtype, tokens):
    dispatch._chosen.pop("add_norm", None)
    stream, pending, norm = operands(tokens, features, dtype)
    check(stream, pending, norm, add_norm)
    check(stream, in_parts(pending, 4), norm, add_norm)
    assert dispatch.implementations()["add_norm"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_a_width_without_a_kernel_is_seen_to_run_the_reference():
    dispatch._chosen.pop("add_norm", None)
    check(*operands(3, 576, jnp.float32), add_norm)
    assert dispatch.implementations()["add_norm"] == ("XLA: 576 features",)
