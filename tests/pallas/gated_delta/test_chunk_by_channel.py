"""Decayed products of a chunk against float64, also where a decay leaves nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.gated_delta.chunk_by_channel import decayed_products


@pytest.mark.parametrize("decay", [0.01, 1.0, 300.0, 1e5])
@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_products_are_decayed_by_the_tokens_between(tokens, decay):
    """Decays of neighbours differ a hundredfold, so that some tokens are forgotten at once."""
    rng = np.random.default_rng(tokens)
    x, k = rng.normal(size=(2, 2, tokens, 8))
    g = -decay * rng.exponential(size=(2, tokens, 8)) ** 2
    expected = np.zeros((2, tokens, tokens))
    for t in range(tokens):
        for i in range(t + 1):
            between = np.exp(g[:, i + 1 : t + 1].sum(axis=1))
            expected[:, t, i] = (x[:, t] * k[:, i] * between).sum(axis=1)
    found = decayed_products(*(jnp.asarray(a, jnp.float32) for a in (x, k, g)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_token_that_forgets_everything_spoils_no_product():
    g = np.full((1, 4, 8), -0.1, np.float32)
    g[0, 2] = -np.inf
    ones = jnp.ones((1, 4, 8))
    found = np.asarray(decayed_products(ones, ones, jnp.asarray(g)))[0]
    assert not found[2:, :2].any()
    np.testing.assert_allclose(found[[1, 3], [0, 2]], 8 * np.exp(-0.1), rtol=1e-6)
