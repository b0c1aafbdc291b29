"""matmul: the product, also where one row is made two."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers.linear import matmul
from jaxspec.pallas import dispatch


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_matmul_is_the_product_with_one_row_too(monkeypatch, platform, rows):
    device = types.SimpleNamespace(platform=platform)
    monkeypatch.setattr(dispatch, "default_device", lambda: device)
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(rows, 8)), rng.normal(size=(8, 5))
    out = matmul(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), jnp.float32)
    assert out.dtype == jnp.float32 and out.shape == (rows, 5)
    np.testing.assert_allclose(out, x @ weight, rtol=0.03, atol=0.03)


def test_no_product_on_a_gpu_has_one_row(monkeypatch):
    """XLA would make a sum of it; see `matmul`."""
    monkeypatch.setattr(dispatch, "default_device", lambda: types.SimpleNamespace(platform="gpu"))
    jaxpr = jax.make_jaxpr(matmul)(jnp.zeros((1, 8)), jnp.zeros((8, 5)))
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [e.invars[0].aval.shape for e in products] == [(2, 8)]
