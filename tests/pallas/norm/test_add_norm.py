"""add_norm against NumPy; kernel = reference, a row of NaN among its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measure.shapes import HIDDEN
from jaxspec.pallas import dispatch
from jaxspec.pallas.norm.add_norm import add_norm, add_norm_reference, rms_norm
from jaxspec.pallas.norm.add_norm_kernel import add_norm_kernel

EPS = 1e-6
LOST = 1  # the row that has a NaN


def operands(tokens, features, dtype, weight_dtype=None):
    """A residual stream, what is added to it, and a weight."""
    rng = np.random.default_rng(features)
    x, delta = rng.normal(size=(2, tokens, features))
    x *= np.exp(rng.normal(size=(tokens, 1)))  # rows of any length
    delta[LOST:2, features // 3] = np.nan
    weight = rng.normal(size=features)
    return *(jnp.asarray(a, dtype) for a in (x, delta)), jnp.asarray(weight, weight_dtype or dtype)


def in_parts(delta, parts):
    """Float32 sums over `parts` whose sum is, but for a rounding of float32, `delta`."""
    rng = np.random.default_rng(parts)
    shares = rng.normal(size=(parts, *delta.shape)).astype(np.float32)
    shares[-1] = np.asarray(delta, np.float32) - shares[:-1].sum(axis=0)
    return jnp.asarray(shares)


def oracle(x, delta, weight, zero_centred):
    """Sum and norm in float64, of the sum as the operands' dtype rounds it."""
    if delta.ndim == 3:
        delta = jnp.asarray(np.asarray(delta).sum(axis=0), x.dtype)
    total = (np.asarray(x, np.float64) + np.asarray(delta, np.float64)).astype(x.dtype)
    wide = total.astype(np.float64)
    root = np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS)
    return total, wide / root * (np.asarray(weight, np.float64) + zero_centred)


def check(x, delta, weight, run, zero_centred=True):
    """`run` is the oracle: the sum bit for bit, the norm to a rounding, but for the lost row."""
    total, normed = run(x, delta, weight, EPS, zero_centred=zero_centred)
    expected_total, expected = oracle(x, delta, weight, zero_centred)
    assert total.dtype == normed.dtype == x.dtype and total.shape == normed.shape == x.shape
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (total, expected_total)))
    nan = np.isnan(np.asarray(normed, np.float32)).all(axis=1)
    np.testing.assert_array_equal(nan, np.arange(len(x)) == LOST)
    tolerance = max(float(jnp.finfo(x.dtype).eps) / 2 * 1.01, 1e-6)
    got = np.asarray(normed, np.float64)
    np.testing.assert_allclose(got[~nan], expected[~nan], rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("op", [add_norm, add_norm_reference])
def test_where_there_is_nothing_to_add_the_norm_is_of_the_stream(op):
    x, _, weight = operands(5, 24, jnp.bfloat16)
    total, normed = op(x, None, weight, EPS)
    assert total is x
    np.testing.assert_array_equal(*(np.float32(a) for a in (normed, rms_norm(x, weight, EPS))))


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_norm_is_of_the_rounded_sum(dtype, zero_centred):
    check(*operands(5, 24, dtype), add_norm, zero_centred)


@pytest.mark.parametrize("parts", [1, 4])
def test_parts_are_summed_and_rounded_first(parts):
    x, delta, weight = operands(5, 24, jnp.bfloat16)
    check(x, in_parts(delta, parts), weight, add_norm)


def test_the_norm_alone_takes_any_batch_and_keeps_zeros():
    x, _, weight = operands(6, 8, jnp.float32)
    by_heads = rms_norm(x.reshape(2, 3, 8), weight, EPS)
    np.testing.assert_array_equal(by_heads.reshape(6, 8), rms_norm(x, weight, EPS))
    assert not rms_norm(jnp.zeros((2, 8)), weight, EPS).any()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize(
    ("tokens", "features", "dtype", "weight_dtype", "parts"),
    [
        (3, 1024, jnp.bfloat16, None, 0),
        (1, 2560, jnp.bfloat16, None, 0),  # by 8 bytes
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

    def run(x, delta, weight, eps, *, zero_centred):
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        return add_norm_kernel(
            x, delta, weight, eps=eps, zero_centred=zero_centred, interpret=interpret
        )

    x, delta, weight = operands(tokens, features, dtype, weight_dtype)
    check(x, in_parts(delta, parts) if parts else delta, weight, run, zero_centred)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 256, 8192])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("features", HIDDEN.values())
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(features, dtype, tokens):
    dispatch._chosen.pop("add_norm", None)
    x, delta, weight = operands(tokens, features, dtype)
    check(x, delta, weight, add_norm)
    check(x, in_parts(delta, 4), weight, add_norm)
    assert dispatch.implementations()["add_norm"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_a_stream_no_kernel_takes_is_seen_to_run_the_reference():
    dispatch._chosen.pop("add_norm", None)
    check(*operands(3, 576, jnp.float32), add_norm)
    assert dispatch.implementations()["add_norm"] == ("XLA: 576 features",)
