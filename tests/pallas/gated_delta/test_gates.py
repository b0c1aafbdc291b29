"""The gates of Gated DeltaNet against NumPy, and as kernels compute them."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.gated_delta.heads import channel_gates, gates, gates_in_kernel


def test_decay_and_strength_are_those_of_the_paper():
    rng = np.random.default_rng(1)
    b, a = 4 * rng.normal(size=(2, 5, 3)).astype(np.float32)
    decay = rng.normal(size=(3, 2)).astype(np.float32)
    g, beta = gates(*map(jnp.asarray, (b, a, decay)))
    log_decay, bias = np.float64(decay.T)
    factor = (1 + np.exp(a + bias)) ** -np.exp(log_decay)
    np.testing.assert_allclose(np.exp(np.float64(g)), factor, rtol=1e-5)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-np.float64(b))), rtol=1e-6)


def test_decays_by_channel_are_those_of_the_paper():
    rng = np.random.default_rng(3)
    f, bias, log_rate = (rng.normal(size=size) for size in ((5, 3, 4), (3, 4), 3))
    g = channel_gates(*(jnp.asarray(x, jnp.float32) for x in (f, log_rate, bias)))
    factor = (1 + np.exp(f + bias)) ** -np.exp(log_rate)[:, None]
    np.testing.assert_allclose(np.exp(np.float64(g)), factor, rtol=1e-5)


def test_a_kernel_s_gates_are_the_gates():
    rng = np.random.default_rng(2)
    b, a = (jnp.asarray(6 * rng.normal(size=(5, 3)), jnp.float32) for _ in range(2))
    decay = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    columns = (jnp.broadcast_to(column, b.shape) for column in decay.T)
    for ours, theirs in zip(gates_in_kernel(b, a, *columns), gates(b, a, decay), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6)
