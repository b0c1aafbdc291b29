"""The parts that products share, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_8bit import blocks_of, dequantised, dequantised_rows, rows_of

from jaxspec.pallas.matmul import products
from jaxspec.pallas.matmul.float8_terms import as_multiplied
from jaxspec.pallas.matmul.products import check_inner, matmul
from jaxspec.weight import Dense, Float8


def run_on(monkeypatch, platform):
    device = type("Device", (), {"platform": platform})
    monkeypatch.setattr("jaxspec.device.default_device", lambda: device)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_product_has_as_many_rows_as_its_operand_on_any_device(monkeypatch, platform, rows):
    run_on(monkeypatch, platform)
    rng = np.random.default_rng(rows)
    x, weight = rng.normal(size=(rows, 32)), rng.normal(size=(32, 8))
    y = matmul(jnp.asarray(x, jnp.bfloat16), Dense(jnp.asarray(weight, jnp.bfloat16)), jnp.float32)
    assert y.dtype == jnp.float32 and y.shape == (rows, 8)
    rounded = (np.asarray(jnp.asarray(z, jnp.bfloat16), np.float64) for z in (x, weight))
    np.testing.assert_allclose(y, np.matmul(*rounded), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_a_weight_in_8_bits_is_multiplied_as_it_is_rounded(dtype):
    rng = np.random.default_rng(0)
    x, dense = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((3, 32), (32, 8)))
    weight = Float8.of(Dense(dense))
    y = matmul(x, weight, dtype)
    assert y.dtype == (dtype or x.dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(weight.dense().array, np.float64)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), expected, rtol=2**-8 if dtype is None else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("columns_at_a_time", [64, 128, 4096])
def test_a_published_weight_is_multiplied_without_rounding(monkeypatch, columns_at_a_time):
    monkeypatch.setattr(products, "_DENSE_COLUMNS", columns_at_a_time)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 256)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    weight, parts = blocks_of(256, 192, 100)
    for of, expected in ((weight, dequantised(parts)), (rows_of(256, 100), None)):
        expected = dequantised_rows(of) if expected is None else expected
        y, expected = matmul(x, of, jnp.float32), wide @ expected
        np.testing.assert_allclose(y, expected, atol=1e-6 * np.abs(expected).max())
        assert matmul(x, of).dtype == jnp.bfloat16


@pytest.mark.parametrize("of_blocks", [True, False])
def test_a_published_weight_of_one_term_is_multiplied_by_rounded_activations(of_blocks):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 256)), jnp.bfloat16)
    weight = blocks_of(256, 192)[0] if of_blocks else rows_of(256, 192)
    one = dataclasses.replace(weight, terms=1)
    seen = np.asarray(as_multiplied(x, one), np.float64)
    expected = seen @ np.asarray(weight.dense().array, np.float64)
    np.testing.assert_allclose(
        matmul(x, one, jnp.float32), expected, atol=1e-6 * np.abs(expected).max()
    )
    exact = matmul(x, weight, jnp.float32)
    distance = np.linalg.norm(expected - exact) / np.linalg.norm(exact)
    assert 0.01 < distance < 0.05


def test_no_product_on_a_gpu_has_one_row(monkeypatch):
    """XLA would turn it into multiplications and sums."""
    run_on(monkeypatch, "gpu")
    jaxpr = jax.make_jaxpr(matmul)(jnp.zeros((1, 8)), Dense(jnp.zeros((8, 5))))
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [e.invars[0].aval.shape for e in products] == [(2, 8)]


def test_a_weight_for_other_features_is_refused():
    check_inner(64, Dense(jnp.zeros((64, 8))))
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 8 x"):
        check_inner(64, Dense(jnp.zeros((8, 64))))
