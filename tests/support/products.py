"""Operands of products with a row of NaN, and what NumPy makes of them."""

import jax.numpy as jnp
import numpy as np

LOST = 1  # the row that has a NaN


def operands(tokens, inner, outer, dtype):
    """x and weight."""
    rng = np.random.default_rng(inner)
    x, weight = rng.normal(size=(tokens, inner)), rng.normal(size=(inner, outer)) * inner**-0.5
    x[LOST : LOST + 1, inner // 3] = np.nan
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def product(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64)


def check(y, expected, dtype, roundings=2):
    """`y` is as expected but for so many roundings, and NaN in its own row alone."""
    assert y.shape == expected.shape
    got = np.asarray(y, np.float64)
    nan = np.isnan(got).all(axis=1)
    np.testing.assert_array_equal(nan, np.arange(len(got)) == LOST)
    eps = roundings * max(float(jnp.finfo(dtype).eps), 1e-6)
    np.testing.assert_allclose(got[~nan], expected[~nan], rtol=eps, atol=eps)
