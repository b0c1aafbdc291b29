"""feed_forward is the equations of the layer, whichever of its products gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.matmul.feed_forward import feed_forward, squared_relu_feed_forward
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense

EPS = 1e-6


def oracle(stream, pending, norm, gate_up, down):
    """The sum, and the layer's output for its norm, in float64."""
    stream, scale, gate_up, down = (
        np.asarray(a, np.float64) for a in (stream, norm.weight, gate_up.array, down.array)
    )
    if pending is not None:
        pending = np.asarray(pending, np.float64)
        stream = stream + (pending.sum(axis=0) if pending.ndim == 3 else pending)
    root = np.sqrt((stream**2).mean(axis=1, keepdims=True) + EPS)
    gate, up = np.split(stream / root * (scale + norm.zero_centred) @ gate_up, 2, axis=1)
    return stream, (gate / (1 + np.exp(-gate)) * up) @ down


def operands(rows, features, inner, dtype, *, zero_centred=False):
    """A stream, a norm, and two weights."""
    rng = np.random.default_rng(rows)
    stream, scale = rng.normal(size=(rows, features)), rng.normal(size=features)
    gate_up = rng.normal(size=(features, 2 * inner)) * features**-0.5
    down = rng.normal(size=(inner, features)) * inner**-0.5
    stream, scale, gate_up, down = (jnp.asarray(a, dtype) for a in (stream, scale, gate_up, down))
    return stream, Norm(scale, EPS, zero_centred), Dense(gate_up), Dense(down)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("shape", [None, (), (3,)], ids=["nothing", "tokens", "parts"])
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_the_layer_is_its_equations(rows, shape, zero_centred):
    stream, *rest = operands(rows, 32, 48, jnp.float32, zero_centred=zero_centred)
    pending = None
    if shape is not None:
        sums = np.random.default_rng(1).normal(size=(*shape, rows, 32))
        pending = jnp.asarray(sums, jnp.float32)
    total, added = jax.jit(feed_forward)(stream, pending, *rest)
    expected_total, expected = oracle(stream, pending, *rest)
    np.testing.assert_allclose(total, expected_total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sum_parts(added, stream.dtype), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [None, (), (3,)], ids=["nothing", "tokens", "parts"])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_without_a_gate_the_layer_is_its_equations(rows, shape):
    stream, norm, gate_up, down = operands(rows, 32, 48, jnp.float32, zero_centred=False)
    up, pending = Dense(gate_up.array[:, :48]), None
    if shape is not None:
        sums = np.random.default_rng(1).normal(size=(*shape, rows, 32))
        pending = jnp.asarray(sums, jnp.float32)
    layer = jax.jit(squared_relu_feed_forward)
    total, added = layer(stream, pending, norm, up, down)
    expected_total, _ = oracle(stream, pending, norm, gate_up, down)
    root = np.sqrt((expected_total**2).mean(axis=1, keepdims=True) + EPS)
    normed = expected_total / root * np.asarray(norm.weight, np.float64)
    hidden = np.maximum(normed @ np.asarray(up.array, np.float64), 0) ** 2
    expected = hidden @ np.asarray(down.array, np.float64)
    np.testing.assert_allclose(total, expected_total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sum_parts(added, stream.dtype), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 9])
def test_a_row_of_nan_stays_alone(rows):
    stream = jnp.ones((rows + 1, 32)).at[rows, 3].set(jnp.nan)
    norm, gate_up, down = Norm(jnp.ones(32), EPS), jnp.ones((32, 96)), Dense(jnp.ones((48, 32)))
    for layer, first in (feed_forward, gate_up), (squared_relu_feed_forward, gate_up[:, :48]):
        _, added = layer(stream, jnp.ones_like(stream), norm, Dense(first), down)
        assert np.isnan(added).all(axis=1).tolist() == [False] * rows + [True]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 64, 256])
def test_on_a_gpu_the_kernels_are_the_layer(rows):
    """Partial sums are pending before, and after."""
    stream, *rest = operands(rows, 1024, 3584, jnp.bfloat16)
    sums = np.random.default_rng(1).normal(size=(8, rows, 1024)) / 3
    pending = jnp.asarray(sums, jnp.float32)
    total, added = jax.jit(feed_forward)(stream, pending, *rest)
    assert added.ndim == 3
    expected_total, expected = oracle(stream, pending, *rest)
    np.testing.assert_allclose(np.float64(total), expected_total, rtol=2**-7, atol=2**-7)
    tolerance = 2**-6 * np.abs(expected).max()
    got = np.float64(sum_parts(added, stream.dtype))
    np.testing.assert_allclose(got, expected, atol=tolerance)
