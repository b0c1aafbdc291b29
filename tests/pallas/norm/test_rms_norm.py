"""rms_norm against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.norm.rms_norm import Norm, rms_norm

EPS = 1e-3


def operands(zero_centred):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=8), jnp.float32)
    return jnp.asarray(rng.normal(size=(6, 8)), jnp.float32), Norm(weight, EPS, zero_centred)


@pytest.mark.parametrize("zero_centred", [False, True])
def test_the_norm_is_its_equation(zero_centred):
    x, norm = operands(zero_centred)
    wide = np.asarray(x, np.float64)
    scale = np.asarray(norm.weight, np.float64) + zero_centred
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * scale
    np.testing.assert_allclose(norm(x), expected, rtol=1e-6)


def test_the_result_has_the_dtype_of_the_operand():
    x, norm = operands(zero_centred=True)
    assert norm(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_any_number_of_axes_may_come_before_the_last():
    x, norm = operands(zero_centred=False)
    by_heads = rms_norm(x.reshape(2, 3, 8), norm.weight, EPS)
    np.testing.assert_array_equal(by_heads.reshape(6, 8), norm(x))


def test_zeros_stay_zeros():
    _, norm = operands(zero_centred=False)
    assert not norm(jnp.zeros((2, 8))).any()
