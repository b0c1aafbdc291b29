"""What products have in common against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.matmul.products import check_gates, check_inner, gated, matmul
from jaxspec.pallas.norm.residual import whole


def test_parts_are_summed_in_float32_and_rounded_once():
    parts = np.random.default_rng(0).normal(size=(8, 3, 16)).astype(np.float32)
    out = whole(jnp.asarray(parts), jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    expected = parts.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(np.float64(out), expected, rtol=2**-8, atol=1e-6)


def test_tokens_pass():
    tokens = jnp.ones((3, 16), jnp.bfloat16)
    assert whole(tokens, jnp.bfloat16) is tokens


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_product_has_as_many_rows_as_came_on_any_device(monkeypatch, platform, rows):
    """A GPU gets one row twice."""
    device = type("Device", (), {"platform": platform})
    monkeypatch.setattr("jaxspec.device.default_device", lambda: device)
    rng = np.random.default_rng(rows)
    x, weight = rng.normal(size=(rows, 32)), rng.normal(size=(32, 8))
    y = matmul(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), jnp.float32)
    assert y.dtype == jnp.float32
    rounded = (np.asarray(jnp.asarray(z, jnp.bfloat16), np.float64) for z in (x, weight))
    np.testing.assert_allclose(y, np.matmul(*rounded), rtol=1e-5, atol=1e-5)


def test_gates_come_before_what_they_gate():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    expected = x[:, :4] / (1 + np.exp(-x[:, :4])) * x[:, 4:]
    np.testing.assert_allclose(gated(jnp.asarray(x)), expected, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused():
    check_inner(64, jnp.zeros((64, 8)))
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 8 x"):
        check_inner(64, jnp.zeros((8, 64)))
    check_gates(6)
    with pytest.raises(ValueError, match="as many gates as others, but 7 columns came"):
        check_gates(7)
