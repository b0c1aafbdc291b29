"""How a matmul with published weights in 8 bits is tiled, and what the kernel declines."""

import jax
import jax.numpy as jnp
import pytest
from sm90 import array

from benchmarks.measure.shapes import HIDDEN, INTERMEDIATE
from jaxspec.pallas.matmul.float8 import Float8Tiling, why_not_kernel
from jaxspec.pallas.matmul.float8_terms import CHUNK
from jaxspec.weight import Float8Blocks, Float8Rows

F8 = jnp.float8_e4m3fn


SIZES = [
    (8, 4096, 12288, False, Float8Tiling(8, 1, 1, 1)),
    (1, 12288, 4096, True, Float8Tiling(8, 1, 1, 4)),
    (8, 4096, 4096, True, Float8Tiling(8, 1, 1, 4)),
    (8, 6144, 5120, True, Float8Tiling(8, 1, 1, 3)),
    (12, 4096, 4096, True, Float8Tiling(16, 1, 1, 2)),
    (64, 4096, 24576, False, Float8Tiling(64, 1, 2, 1)),
    (64, 12288, 4096, True, Float8Tiling(64, 1, 2, 4)),
    (64, 4096, 192, False, Float8Tiling(64, 1, 1, 1)),
    (65, 4096, 24576, False, Float8Tiling(40, 2, 2, 1)),
    (256, 4096, 24576, False, Float8Tiling(64, 4, 2, 1)),
]


@pytest.mark.parametrize(("tokens", "inner", "outer", "is_split", "expected"), SIZES)
def test_tilings(tokens, inner, outer, is_split, expected):
    assert Float8Tiling.of(tokens, inner, outer, is_split=is_split) == expected


@pytest.mark.parametrize("model", HIDDEN)
@pytest.mark.parametrize("tokens", range(1, 300, 17))
def test_blocks_have_every_row_and_column_and_parts_every_feature(model, tokens):
    inner, outer = INTERMEDIATE[model], HIDDEN[model]
    tiling = Float8Tiling.of(tokens, inner, outer, is_split=True)
    assert tiling.rows * (tiling.row_blocks - 1) < tokens <= tiling.rows * tiling.row_blocks
    assert tiling.rows % 8 == 0 and outer % (64 * tiling.warpgroups) == 0
    assert 1 <= tiling.parts <= inner // CHUNK
    assert tiling.blocks(outer) == (
        tiling.parts * tiling.row_blocks * outer // (64 * tiling.warpgroups)
    )


def weight_of(kind, inner, outer):
    scale = (outer // 64, inner // 128) if kind is Float8Blocks else (outer,)
    return kind(array(outer, inner, dtype=F8), array(*scale))


@pytest.mark.parametrize(
    ("kind", "inner", "outer", "dtype", "why"),
    [
        (Float8Blocks, 4096, 64, jnp.bfloat16, None),
        (Float8Rows, 2688, 64, jnp.bfloat16, None),
        (Float8Blocks, 2688, 64, jnp.bfloat16, "a weight of 2688 x 64"),
        (Float8Rows, 2688, 96, jnp.bfloat16, "a weight of 2688 x 96"),
        (Float8Rows, 192, 64, jnp.bfloat16, "a weight of 192 x 64"),
        (Float8Blocks, 4096, 64, jnp.float16, "float16 for 8 bits"),
        (Float8Rows, 4096, 64, jnp.float32, "float32 for 8 bits"),
    ],
)
def test_what_the_kernel_declines(kind, inner, outer, dtype, why):
    x = jax.ShapeDtypeStruct((3, inner), dtype)
    assert why_not_kernel(x, weight_of(kind, inner, outer)) == why
