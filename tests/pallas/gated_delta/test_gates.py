"""The gates of Gated DeltaNet against NumPy, and the functions that their kernels have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.gated_delta.gates import _exp, _sigmoid, _softplus, gates, in_kernel


def test_decay_and_strength_are_those_of_the_paper():
    rng = np.random.default_rng(1)
    b, a = 4 * rng.normal(size=(2, 5, 3)).astype(np.float32)
    decay = rng.normal(size=(3, 2)).astype(np.float32)
    g, beta = gates(*map(jnp.asarray, (b, a, decay)))
    log_decay, bias = np.float64(decay.T)
    factor = (1 + np.exp(a + bias)) ** -np.exp(log_decay)
    np.testing.assert_allclose(np.exp(np.float64(g)), factor, rtol=1e-5)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-np.float64(b))), rtol=1e-6)


ARGUMENTS = np.linspace(-80, 80, 64001).astype(np.float32)  # beyond, exp leaves the normal numbers


@pytest.mark.parametrize(
    ("ours", "oracle"),
    [
        (_exp, np.exp),
        (_softplus, lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))),
        (_sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    ],
)
def test_the_kernel_s_functions_are_as_good_as_float32_has_them(ours, oracle):
    np.testing.assert_allclose(ours(ARGUMENTS), oracle(np.float64(ARGUMENTS)), rtol=6e-7)


def test_the_kernel_s_functions_pass_on_what_is_no_number_and_saturate():
    ends = jnp.asarray([-jnp.inf, -1e30, 1e30, jnp.inf, jnp.nan])
    np.testing.assert_allclose(_softplus(ends), jax.nn.softplus(ends), atol=2e-38)
    np.testing.assert_allclose(_sigmoid(ends), jax.nn.sigmoid(ends), atol=2e-38)


def test_a_kernel_s_gates_are_the_gates():
    rng = np.random.default_rng(2)
    b, a = (jnp.asarray(6 * rng.normal(size=(5, 3)), jnp.float32) for _ in range(2))
    decay = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    columns = (jnp.broadcast_to(column, b.shape) for column in decay.T)
    for ours, theirs in zip(in_kernel(b, a, *columns), gates(b, a, decay), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6)
