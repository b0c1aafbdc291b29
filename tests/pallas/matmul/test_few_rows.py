"""Which products of few rows kernels take."""

import jax.numpy as jnp
import pytest

from jaxspec.pallas.matmul.few_rows import unsupported


@pytest.mark.parametrize(
    ("rows", "inner", "outer", "dtype", "hidden", "why"),
    [
        (1, 1024, 8256, jnp.bfloat16, 1024, None),
        (8, 6144, 2048, jnp.float16, 2048, None),
        (9, 1024, 8256, jnp.bfloat16, 1024, "not 1 to 8 rows"),
        (0, 1024, 8256, jnp.bfloat16, 1024, "not 1 to 8 rows"),
        (1, 1024, 8256, jnp.float32, 1024, "float32 and float32"),
        (1, 4096, 8192, jnp.bfloat16, 4096, "4096 features"),
        (1, 1000, 1024, jnp.bfloat16, 1024, "a weight of 1000 x 1024"),
        (1, 8256, 1024, jnp.bfloat16, 1024, "a weight of 8256 x 1024"),
        (1, 1024, 1000, jnp.bfloat16, 1024, "a weight of 1024 x 1000"),
    ],
)
def test_kernels_take_few_rows_of_the_small_models(rows, inner, outer, dtype, hidden, why):
    x, weight = jnp.zeros((rows, inner), dtype), jnp.zeros((inner, outer), dtype)
    assert unsupported(x, weight, hidden) == why
