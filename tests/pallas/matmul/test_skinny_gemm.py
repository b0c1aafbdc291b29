"""Which products of up to 8 rows are kernels, and how their features are split."""

import jax
import jax.numpy as jnp
import pytest

from jaxspec.pallas.matmul.skinny_gemm import (
    HIDDEN,
    SPLIT_HIDDEN,
    num_parts,
    why_not_kernel,
)
from jaxspec.weight import Dense


@pytest.mark.parametrize(
    ("rows", "inner", "outer", "dtype", "hidden", "why"),
    [
        (1, 1024, 8256, jnp.bfloat16, 1024, None),
        (8, 6144, 2048, jnp.float16, 2048, None),
        (9, 1024, 8256, jnp.bfloat16, 1024, "not 1 to 8 rows"),
        (1, 1024, 8256, jnp.float32, 1024, "float32 and float32"),
        (1, 4096, 8192, jnp.bfloat16, 4096, "4096 features"),
        (1, 1000, 1024, jnp.bfloat16, 1024, "a weight of 1000 x 1024"),
        (1, 8256, 1024, jnp.bfloat16, 1024, "a weight of 8256 x 1024"),
        (1, 1024, 1000, jnp.bfloat16, 1024, "a weight of 1024 x 1000"),
    ],
)
def test_kernels_take_few_rows_of_small_models(rows, inner, outer, dtype, hidden, why):
    x = jax.ShapeDtypeStruct((rows, inner), dtype)
    weight = Dense(jax.ShapeDtypeStruct((inner, outer), dtype))
    assert why_not_kernel(x, weight, hidden) == why


def test_a_product_that_is_split_is_faster_in_more_models():
    x = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16)
    for hidden in (1024, 2048, 2304, 2560, 2688, 4096):
        weight = Dense(jax.ShapeDtypeStruct((4096, hidden), jnp.bfloat16))
        why, split = (
            why_not_kernel(x, weight, hidden, widths) for widths in (HIDDEN, SPLIT_HIDDEN)
        )
        assert why == (None if hidden <= 2048 else f"{hidden} features")
        assert split == (None if hidden < 4096 else f"{hidden} features")


@pytest.mark.parametrize(
    ("inner", "outer", "unit", "parts"),
    [(3584, 1024, 512, 7), (2048, 1024, 256, 8), (6144, 2048, 512, 4), (2048, 2048, 256, 4)],
)
def test_nearly_every_multiprocessor_has_a_block(inner, outer, unit, parts):
    assert num_parts(inner, outer, unit=unit) == parts
