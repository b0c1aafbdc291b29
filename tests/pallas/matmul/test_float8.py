"""How a matmul with published weights in 8 bits is tiled, and what the kernel declines."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from sm90 import array

from jaxspec.pallas.matmul.float8 import (
    Float8Tiling,
    is_fused,
    why_not_kernel,
    why_not_split_by_kernel,
)
from jaxspec.weight import Float8Blocks, Float8Rows

F8 = jnp.float8_e4m3fn


SIZES = [
    (8, 4096, 12288, False, Float8Tiling(8, 1)),
    (1, 12288, 4096, True, Float8Tiling(8, 4)),
    (8, 4096, 4096, True, Float8Tiling(8, 4)),
    (8, 6144, 5120, True, Float8Tiling(8, 3)),
    (8, 256, 64, True, Float8Tiling(8, 2)),
    (12, 4096, 16384, True, Float8Tiling(16, 1)),
    (1, 4096, 34816, True, Float8Tiling(8, 1)),
]


@pytest.mark.parametrize(("tokens", "inner", "outer", "is_split", "expected"), SIZES)
def test_tilings(tokens, inner, outer, is_split, expected):
    assert Float8Tiling.of(tokens, inner, outer, is_split=is_split) == expected
    assert expected.blocks(outer) == expected.parts * outer // 64


def weight_of(kind, inner, outer):
    scale = (outer // 64, inner // 128) if kind is Float8Blocks else (outer,)
    return kind(array(outer, inner, dtype=F8), array(*scale))


@pytest.mark.parametrize(
    ("kind", "inner", "outer", "dtype", "why"),
    [
        (Float8Blocks, 4096, 64, jnp.bfloat16, None),
        (Float8Rows, 2688, 64, jnp.bfloat16, None),
        (Float8Blocks, 4352, 64, jnp.bfloat16, None),
        (Float8Blocks, 2176, 64, jnp.bfloat16, None),
        (Float8Blocks, 192, 64, jnp.bfloat16, "a weight of 192 x 64"),
        (Float8Rows, 2688, 96, jnp.bfloat16, "a weight of 2688 x 96"),
        (Float8Rows, 192, 64, jnp.bfloat16, "a weight of 192 x 64"),
        (Float8Blocks, 4096, 64, jnp.float16, "float16 for 8 bits"),
        (Float8Rows, 4096, 64, jnp.float32, "float32 for 8 bits"),
    ],
)
def test_what_the_kernel_declines(kind, inner, outer, dtype, why):
    x = jax.ShapeDtypeStruct((3, inner), dtype)
    assert why_not_kernel(x, weight_of(kind, inner, outer)) == why


def test_few_rows_are_split_in_every_block_but_for_scales_of_whole_rows_or_odd_numbers_of_them():
    blocks, rows = (weight_of(kind, 512, 64) for kind in (Float8Blocks, Float8Rows))
    for weight in (blocks, rows, dataclasses.replace(blocks, terms=1)):
        assert is_fused(8, weight) and not is_fused(9, weight)
        assert why_not_split_by_kernel(weight) is None
    whole = dataclasses.replace(rows, terms=1)
    thirds = weight_of(Float8Blocks, 384, 64)  # a copy has a multiple of 4 scales
    assert not is_fused(8, thirds) and is_fused(8, weight_of(Float8Rows, 384, 64))
    assert not is_fused(1, whole)
    assert why_not_split_by_kernel(whole) == "a scale for each row of activations"
