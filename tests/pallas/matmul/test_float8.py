"""Two e4m3 numbers per activation: exact; and how a matmul of them is tiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sm90 import array

from benchmarks.measure.shapes import HIDDEN, INTERMEDIATE
from jaxspec.pallas.matmul.float8 import CHUNK, Float8Tiling, split, why_not_kernel
from jaxspec.weight import Float8Blocks, Float8Rows

F8 = jnp.float8_e4m3fn


def joined(x):
    """`factor * (high + low / 16)` in float64."""
    high, low, factor = split(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
    assert high.dtype == low.dtype == F8 and factor.dtype == jnp.float32
    high, low = (np.asarray(part.astype(jnp.float32), np.float64) for part in (high, low))
    return np.asarray(factor, np.float64)[:, None] * (high + low / 16)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**-60, 2.0**60, 2.0**110])
def test_a_row_is_the_sum_of_its_two_halves(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, CHUNK)) * np.exp(rng.normal(size=(64, CHUNK))) * size
    exact, largest = rounded(x), np.abs(rounded(x)).max(axis=1, keepdims=True)
    difference = np.abs(joined(x) - exact)
    is_large = np.abs(exact) >= largest * 2.0**-13
    assert is_large.mean() > 0.9 and not difference[is_large].any()
    assert (difference <= largest * 2.0**-21).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_all_significant_bits_are_kept_at_every_distance_from_the_largest(sign):
    """All significands of 8 bits, with exponents down to 2**-13 of the largest."""
    for exponent in range(13):
        for large in (1.0, 1.9921875):
            x = np.append((1 + np.arange(127) / 128) * 2.0**-exponent * 0.5, large)[None]
            np.testing.assert_array_equal(joined(sign * x)[:, :-1], rounded(sign * x)[:, :-1])


@pytest.mark.parametrize("exponent", [*range(-133, -110), 120, 126, 127])
def test_the_smallest_and_largest_numbers_are_kept(exponent):
    """Subnormal numbers too; XLA's CPU takes those for zeros, so NumPy makes and splits none."""
    x = np.array([[1.0, -1.5, 1.25, 0.0] + [0.0] * (CHUNK - 4)]) * 2.0**exponent
    if exponent < -126 + 2:
        assert np.abs(joined(x) - rounded(x)).max() <= 2.0**-124
    else:
        np.testing.assert_array_equal(joined(x), rounded(x))


def test_a_row_of_zeros_is_zeros():
    np.testing.assert_array_equal(joined(np.zeros((2, CHUNK))), np.zeros((2, CHUNK)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_a_number_in_its_own_row(bad):
    x = np.ones((3, CHUNK))
    x[1, 7] = bad
    nan = np.isnan(joined(x))
    assert nan[1, 7] and not nan[[0, 2]].any()


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
