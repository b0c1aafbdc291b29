"""feed_forward is the layer's equations, whichever product gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.matmul.feed_forward import feed_forward
from jaxspec.pallas.norm.residual import whole

EPS = 1e-6


def oracle(x, delta, norm, gate_up, down, zero_centred):
    """In float64."""
    x, norm, gate_up, down = (np.asarray(a, np.float64) for a in (x, norm, gate_up, down))
    if delta is not None:
        delta = np.asarray(delta, np.float64)
        x = x + (delta.sum(axis=0) if delta.ndim == 3 else delta)
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * (norm + zero_centred)
    gate, up = np.split(normed @ gate_up, 2, axis=1)
    return x, (gate / (1 + np.exp(-gate)) * up) @ down


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("parts", [None, 0, 3])
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_the_layer_is_its_equations(rows, parts, zero_centred):
    rng = np.random.default_rng(rows)
    x, norm = rng.normal(size=(rows, 32)), rng.normal(size=32)
    delta = None if parts is None else rng.normal(size=(parts or 1, rows, 32))
    gate_up, down = rng.normal(size=(32, 96)) * 32**-0.5, rng.normal(size=(48, 32)) * 48**-0.5
    case = x, delta if parts else None if delta is None else delta[0], norm, gate_up, down
    x, delta, norm, *weights = (None if a is None else jnp.asarray(a, jnp.float32) for a in case)
    run = jax.jit(lambda *args: feed_forward(*args[:3], EPS, *args[3:], zero_centred=zero_centred))
    total, added = run(x, delta, norm, *weights)
    expected_total, expected = oracle(*case, zero_centred)
    np.testing.assert_allclose(total, expected_total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(whole(added, x.dtype), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 9])
def test_a_row_of_nan_stays_alone(rows):
    x = jnp.ones((rows + 1, 32)).at[rows, 3].set(jnp.nan)
    weights = jnp.ones((32, 96)), jnp.ones((48, 32))
    _, added = feed_forward(x, jnp.ones_like(x), jnp.ones(32), EPS, *weights)
    assert np.isnan(added).all(axis=1).tolist() == [False] * rows + [True]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 64, 256])
def test_on_a_gpu_the_kernels_are_the_layer(rows):
    """Parts of what was before are added, and parts are handed on."""
    rng = np.random.default_rng(rows)
    x, delta = rng.normal(size=(rows, 1024)), rng.normal(size=(8, rows, 1024)) / 3
    weights = rng.normal(size=(1024, 7168)) / 32, rng.normal(size=(3584, 1024)) / 60
    x, norm, *weights = (jnp.asarray(a, jnp.bfloat16) for a in (x, rng.normal(size=1024), *weights))
    delta = jnp.asarray(delta, jnp.float32)
    total, added = jax.jit(lambda *a: feed_forward(*a[:3], EPS, *a[3:]))(x, delta, norm, *weights)
    assert added.ndim == 3
    expected_total, expected = oracle(x, delta, norm, *weights, zero_centred=False)
    np.testing.assert_allclose(np.float64(total), expected_total, rtol=2**-7, atol=2**-7)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.float64(whole(added, x.dtype)), expected, atol=2**-6 * scale)
