"""What products of few rows pass on, and which of them kernels take."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.few_rows import unsupported, whole


def test_parts_are_summed_in_float32_and_rounded_once():
    parts = np.random.default_rng(0).normal(size=(8, 3, 16)).astype(np.float32)
    out = whole(jnp.asarray(parts), jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    expected = parts.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(np.float64(out), expected, rtol=2**-8, atol=1e-6)


def test_tokens_pass():
    tokens = jnp.ones((3, 16), jnp.bfloat16)
    assert whole(tokens, jnp.bfloat16) is tokens


@pytest.mark.parametrize(
    ("rows", "inner", "outer", "dtype", "hidden", "why"),
    [
        (1, 1024, 8224, jnp.bfloat16, 1024, None),
        (8, 6144, 2048, jnp.float16, 2048, None),
        (9, 1024, 8224, jnp.bfloat16, 1024, "not 1 to 8 rows"),
        (0, 1024, 8224, jnp.bfloat16, 1024, "not 1 to 8 rows"),
        (1, 1024, 8224, jnp.float32, 1024, "float32 and float32"),
        (1, 4096, 8192, jnp.bfloat16, 4096, "4096 features"),
        (1, 1000, 1024, jnp.bfloat16, 1024, "a weight of 1000 x 1024"),
        (1, 8256, 1024, jnp.bfloat16, 1024, "a weight of 8256 x 1024"),
        (1, 1024, 1000, jnp.bfloat16, 1024, "a weight of 1024 x 1000"),
    ],
)
def test_kernels_take_few_rows_of_the_small_models(rows, inner, outer, dtype, hidden, why):
    x, weight = jnp.zeros((rows, inner), dtype), jnp.zeros((inner, outer), dtype)
    assert unsupported(x, weight, hidden) == why
