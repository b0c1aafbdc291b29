"""Operands of products, one row with a NaN, and what NumPy makes of them."""

import jax.numpy as jnp
import numpy as np

NAN_ROW = 1


def operands(tokens, inner, outer, dtype):
    """`x` and the array of a weight."""
    rng = np.random.default_rng(inner)
    x, weight = rng.normal(size=(tokens, inner)), rng.normal(size=(inner, outer)) * inner**-0.5
    x[NAN_ROW : NAN_ROW + 1, inner // 3] = np.nan
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def product(x, weight):
    """`x @ weight` in float64."""
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64)


def check(y, expected, dtype, roundings=2):
    """`y` is `expected` up to this many roundings, and NaN in `NAN_ROW` alone."""
    assert y.shape == expected.shape
    got = np.asarray(y, np.float64)
    nan = np.isnan(got).all(axis=1)
    np.testing.assert_array_equal(nan, np.arange(len(got)) == NAN_ROW)
    eps = roundings * max(float(jnp.finfo(dtype).eps), 1e-6)
    np.testing.assert_allclose(got[~nan], expected[~nan], rtol=eps, atol=eps)
