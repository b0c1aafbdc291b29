"""The functions that kernels have of their own, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.recurrent.kernel_math import exp, sigmoid, softplus

ARGUMENTS = np.linspace(-80, 80, 64001).astype(np.float32)  # beyond, exp leaves the normal numbers


@pytest.mark.parametrize(
    ("ours", "oracle"),
    [
        (exp, np.exp),
        (softplus, lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))),
        (sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    ],
)
def test_they_are_as_good_as_float32_has_them(ours, oracle):
    np.testing.assert_allclose(ours(ARGUMENTS), oracle(np.float64(ARGUMENTS)), rtol=6e-7)


def test_they_pass_on_what_is_no_number_and_saturate():
    ends = jnp.asarray([-jnp.inf, -1e30, 1e30, jnp.inf, jnp.nan])
    np.testing.assert_allclose(softplus(ends), jax.nn.softplus(ends), atol=2e-38)
    np.testing.assert_allclose(sigmoid(ends), jax.nn.sigmoid(ends), atol=2e-38)
