"""matmul: the product, also where one row is made two; Linear with padding."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers.linear import Linear, matmul


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_matmul_is_the_product_with_one_row_too(monkeypatch, platform, rows):
    device = types.SimpleNamespace(platform=platform)
    monkeypatch.setattr("jaxspec.device.default_device", lambda: device)
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(rows, 8)), rng.normal(size=(8, 5))
    out = matmul(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), jnp.float32)
    assert out.dtype == jnp.float32 and out.shape == (rows, 5)
    np.testing.assert_allclose(out, x @ weight, rtol=0.03, atol=0.03)


def test_no_product_on_a_gpu_has_one_row(monkeypatch):
    """XLA would make a sum of it; see `matmul`."""
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr("jaxspec.device.default_device", lambda: gpu)
    jaxpr = jax.make_jaxpr(matmul)(jnp.zeros((1, 8)), jnp.zeros((8, 5)))
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [e.invars[0].aval.shape for e in products] == [(2, 8)]


def test_outputs_lie_side_by_side_before_the_padding():
    linear = Linear(8, {"a": 3, "b": 2}, jnp.dtype(jnp.float32), multiple=4)
    assert linear.weight.shape == (8, 8)
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(8, 8)), jnp.asarray(rng.normal(size=(2, 8)), jnp.float32)
    weight[:, 5:] = np.nan
    linear.weight.set_value(jnp.asarray(weight, jnp.float32))
    for part, columns in zip(linear(x), (slice(0, 3), slice(3, 5)), strict=True):
        np.testing.assert_allclose(part, x @ weight[:, columns], rtol=1e-5)
    placements = {p.name: (p.shape, p.index) for p in linear.checkpoint("m.")}
    assert placements == {
        "m.a.weight": ((3, 8), (..., slice(0, 3))),
        "m.b.weight": ((2, 8), (..., slice(3, 5))),
    }
