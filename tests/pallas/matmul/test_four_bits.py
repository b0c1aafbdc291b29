"""How a matmul with published weights in 4 bits is tiled, and what the kernel declines."""

import jax
import jax.numpy as jnp
import pytest
from sm90 import array

from jaxspec.pallas.matmul.four_bits import FourBitsTiling, why_not_kernel
from jaxspec.weight import Float4Groups, Int4Groups


def int4(inner, outer, group=128):
    return Int4Groups(array(outer, inner // 4, dtype=jnp.uint16), array(inner // group, outer))


def float4(inner, outer, group=16):
    scale = array(inner // group, outer, dtype=jnp.float8_e4m3fn)
    return Float4Groups(array(outer, inner // 4, dtype=jnp.uint16), scale, array(outer))


@pytest.mark.parametrize(
    ("tokens", "weight", "is_split", "expected"),
    [
        (8, int4(12288, 4096), True, FourBitsTiling(8, 1, 1, 4, 2)),
        (8, int4(6144, 5120), True, FourBitsTiling(8, 1, 1, 3, 2)),
        (16, int4(6144, 5120), True, FourBitsTiling(16, 1, 1, 3)),
        (1, int4(256, 64), True, FourBitsTiling(8, 1, 1, 1, 2)),
        (1, float4(4096, 24576), False, FourBitsTiling(8, 1, 1, 1)),
        (64, int4(4096, 4096), True, FourBitsTiling(64, 1, 2, 4)),
        (128, int4(4096, 24576), False, FourBitsTiling(128, 1, 2, 1)),
        (128, int4(12288, 4096), True, FourBitsTiling(64, 2, 2, 2)),
        (2048, int4(12288, 4096), True, FourBitsTiling(128, 16, 2, 1)),
        (129, float4(4096, 24576), False, FourBitsTiling(72, 2, 2, 1)),
        (128, int4(4096, 4160, 32), True, FourBitsTiling(32, 4, 1, 1)),
        (128, int4(4096, 4160), False, FourBitsTiling(64, 2, 1, 1)),
    ],
)
def test_tilings(tokens, weight, is_split, expected):
    assert FourBitsTiling.of(tokens, weight, is_split=is_split) == expected
    assert expected.rows * expected.row_blocks >= tokens


@pytest.mark.parametrize(
    ("weight", "dtype", "why"),
    [
        (int4(2688, 64), jnp.bfloat16, None),
        (float4(2688, 64), jnp.bfloat16, None),
        (int4(4096, 64, 32), jnp.bfloat16, None),
        (int4(4096, 64, 16), jnp.bfloat16, "groups of 16"),
        (int4(4096, 64, 256), jnp.bfloat16, "groups of 256"),
        (float4(4096, 64, 32), jnp.bfloat16, "groups of 32"),
        (int4(4096, 96), jnp.bfloat16, "a weight of 4096 x 96"),
        (int4(192, 64, 64), jnp.bfloat16, "a weight of 192 x 64"),
        (int4(4096, 64), jnp.float16, "float16 for 4 bits"),
    ],
)
def test_what_the_kernel_declines(weight, dtype, why):
    assert why_not_kernel(jax.ShapeDtypeStruct((3, weight.inner), dtype), weight) == why
