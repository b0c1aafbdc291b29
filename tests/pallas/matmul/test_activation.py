"""Activation against NumPy, and that its two forms agree."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.matmul.activation import Activation


def test_the_first_half_of_the_columns_gates_the_second():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    expected = x[:, :4] / (1 + np.exp(-x[:, :4])) * x[:, 4:]
    np.testing.assert_allclose(Activation.SWIGLU(jnp.asarray(x)), expected, rtol=1e-6, atol=1e-6)


def test_gate_and_up_of_gpt_oss_alternate_and_are_clamped():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32) * 6
    gate, up = np.minimum(x[:, ::2], 7), np.clip(x[:, 1::2], -7, 7)
    assert (gate < x[:, ::2]).any() and (up != x[:, 1::2]).any()
    expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    found = Activation.CLAMPED_SWIGLU(jnp.asarray(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_without_a_gate_each_column_is_the_square_of_what_is_positive():
    x = np.array([[-3.0, -0.0, 0.5, 4.0]], np.float32)
    np.testing.assert_array_equal(Activation.SQUARED_RELU(jnp.asarray(x)), [[0, 0, 0.25, 16]])


def test_the_square_is_rounded_to_the_dtype_of_the_product():
    x = jnp.asarray([[1.0 + 2**-7]], jnp.bfloat16)
    y = Activation.SQUARED_RELU(x)
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0]) == float(jnp.asarray(float(x[0, 0]) ** 2, jnp.bfloat16))


def test_gelu_is_approximated_by_tanh():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float64)
    gate, up = x[:, :4], x[:, 4:]
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + np.tanh(inner)) * up
    found = Activation.GEGLU(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "activation", [Activation.SWIGLU, Activation.GEGLU, Activation.SQUARED_RELU]
)
def test_pieces_make_what_whole_rows_make_and_nan_stays_nan(activation):
    x = np.random.default_rng(1).normal(size=(5, 4 * activation.pieces)).astype(np.float32)
    x[2, 1] = np.nan
    of_blocks = activation.of_blocks(jnp.split(jnp.asarray(x), activation.pieces, axis=1))
    np.testing.assert_allclose(of_blocks, activation(jnp.asarray(x)), rtol=1e-6, atol=1e-6)
    assert np.argwhere(np.isnan(of_blocks)).tolist() == [[2, 1]]


def test_an_odd_number_of_columns_is_refused_where_there_is_a_gate():
    Activation.SWIGLU.check(6)
    Activation.SQUARED_RELU.check(7)
    with pytest.raises(ValueError, match="the same number of columns, but 7 columns came"):
        Activation.SWIGLU.check(7)
