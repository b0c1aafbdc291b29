"""What is pending is summed and added as NumPy does it."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.norm.residual import add, sum_parts


def test_parts_are_summed_in_float32_and_rounded_once():
    parts = np.random.default_rng(0).normal(size=(8, 3, 16)).astype(np.float32)
    tokens = sum_parts(jnp.asarray(parts), jnp.bfloat16)
    assert tokens.dtype == jnp.bfloat16
    expected = parts.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(np.float64(tokens), expected, rtol=2**-8, atol=1e-6)


def test_tokens_are_returned_as_they_are():
    tokens = jnp.ones((3, 16), jnp.bfloat16)
    assert sum_parts(tokens, jnp.bfloat16) is tokens


def test_nothing_pending_leaves_the_stream():
    stream = jnp.ones((3, 16), jnp.bfloat16)
    assert add(stream, None) is stream


def test_the_sum_has_the_dtype_of_the_stream():
    stream = jnp.full((3, 16), 2, jnp.bfloat16)
    total = add(stream, jnp.full((4, 3, 16), 0.25))
    assert total.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(total), 3.0)
