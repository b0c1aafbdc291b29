"""A Dense weight is its array, and costs a program nothing; one in 8 bits is nearly that array."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_4bit import float4_of, int4_of
from published_8bit import blocks_of, dequantised, dequantised_rows, joined, rows_of

from jaxspec.weight import Dense, Float8, pack, to_float8

ARRAY = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)


def test_it_has_the_sizes_of_its_array():
    weight = Dense(ARRAY)
    assert (weight.inner, weight.outer, weight.dtype) == (3, 4, jnp.float32)


def test_columns_are_a_weight_of_their_own():
    part = Dense(ARRAY).columns(jnp.asarray([3, 1, 1]))
    np.testing.assert_array_equal(part.array, ARRAY[:, [3, 1, 1]])


def test_a_program_gets_the_array_alone():
    def product(x, weight):
        return x @ weight.array

    typed = jax.make_jaxpr(product)(jnp.ones((2, 3)), Dense(ARRAY))
    plain = jax.make_jaxpr(lambda x, weight: x @ weight)(jnp.ones((2, 3)), ARRAY)
    assert str(typed) == str(plain)


def test_8_bits_are_within_a_16th_down_to_an_8000th_of_the_largest():
    random = np.random.default_rng(0)
    sizes = 2.0 ** random.uniform(-13, 0, (40, 50)) * random.choice([-1, 1], (40, 50))
    dense = jnp.asarray(np.append(sizes, np.ones((40, 1)), axis=1), jnp.float32)
    weight = Float8.of(Dense(dense))
    assert (weight.inner, weight.outer, weight.dtype) == (40, 51, jnp.float8_e4m3fn)
    assert weight.array.shape == (51, 40) and weight.scale.shape == ()
    np.testing.assert_allclose(weight.dense().array, dense, rtol=2**-4)


def test_what_8_bits_have_is_kept_whatever_its_size():
    """Integers up to 16 have 4 bits."""
    array = jnp.arange(-16, 17, dtype=jnp.bfloat16).reshape(3, 11)
    for scale in (1.0, 2.0**-40, 2.0**60):
        np.testing.assert_array_equal(Float8.of(Dense(array * scale)).dense().array, array * scale)
    rows = jnp.stack([array[0], array[1] * 2.0**-30, array[2] * 0])
    in_8_bits, scales = to_float8(rows, axis=1)
    np.testing.assert_array_equal(in_8_bits.astype(jnp.float32) * scales, rows)


def test_columns_in_8_bits_are_those_of_the_weight():
    weight = Float8.of(Dense(ARRAY))
    part = weight.columns(jnp.asarray([3, 1, 1]))
    np.testing.assert_array_equal(part.dense().array, weight.dense().array[:, [3, 1, 1]])


def test_what_is_not_finite_is_not_a_number_in_8_bits():
    array = jnp.asarray([[1.0, jnp.nan], [-jnp.inf, 2.0], [3.0, 4.0]])
    in_8_bits, _ = to_float8(array, axis=1)
    is_nan = np.isnan(in_8_bits.astype(jnp.float32))
    assert is_nan[0, 1] and is_nan[1, 0] and not is_nan[2].any()


PARTS = [(192, 320, 128), (64, 100), (40,)]


@pytest.mark.few(2)
@pytest.mark.parametrize("outers", PARTS)
@pytest.mark.parametrize("inner", [256, 192])
def test_published_blocks_have_the_scales_of_their_own_part(outers, inner):
    """Parts end in partial blocks, the features too."""
    weight, parts = blocks_of(inner, *outers)
    assert (weight.inner, weight.outer) == (inner, sum(outers))
    assert weight.dtype == jnp.float8_e4m3fn
    assert weight.nbytes == weight.array.size + 4 * weight.scale.size
    expected = dequantised(parts)
    np.testing.assert_allclose(weight.dense().array, expected, rtol=1e-6)
    np.testing.assert_array_equal(weight.dense(64, 128).array, weight.dense().array[:, 64:192])
    ids = jnp.asarray([3, sum(outers) - 1, 3])
    np.testing.assert_array_equal(weight.columns(ids).array, weight.dense().array[:, ids])


def test_a_scale_per_column_is_that_of_the_column():
    weight = rows_of(96, 70)
    assert (weight.inner, weight.outer, weight.dtype) == (96, 70, jnp.float8_e4m3fn)
    assert weight.nbytes == 96 * 70 + 4 * 70
    expected = dequantised_rows(weight)
    np.testing.assert_allclose(weight.dense().array, expected, rtol=1e-6)
    np.testing.assert_array_equal(weight.dense(64, 64).array, weight.dense().array[:, 64:])
    ids = jnp.asarray([69, 0])
    np.testing.assert_allclose(weight.columns(ids).dense().array, expected[:, ids], rtol=1e-6)


def test_terms_are_no_array_and_stay_with_the_weight():
    """An op sees them while a program is traced."""
    _, parts = blocks_of(256, 64, 64)
    rounded = joined(parts, terms=1)
    assert joined(parts).terms == 2 and rounded.terms == 1
    by_row = dataclasses.replace(rows_of(96, 70), terms=1)
    assert by_row.columns(jnp.asarray([3, 1])).terms == 1
    for weight in (rounded, by_row):
        assert len(jax.tree.leaves(weight)) == 2
        assert jax.tree.map(lambda leaf: leaf, weight).terms == 1


def int4_with_zeros(inner, outer):
    return int4_of(inner, outer, 32, has_zeros=True)


@pytest.mark.parametrize("drawn", [int4_of, int4_with_zeros, float4_of])
def test_4_bits_are_those_of_the_columns(drawn):
    weight, expected = drawn(384, 100)
    assert (weight.inner, weight.outer) == (384, 100)
    stored = (weight.array, weight.scale, getattr(weight, "zero", None))
    others = (getattr(weight, "factor", None),)
    assert weight.nbytes == sum(part.nbytes for part in stored + others if part is not None)
    assert weight.array.nbytes == 384 * 100 / 2
    np.testing.assert_allclose(weight.dense().array, expected, rtol=1e-6)
    np.testing.assert_allclose(weight.dense(64, 128).array, expected[:, 64:], rtol=1e-6)


def test_a_word_has_features_that_are_32_apart():
    numbers = np.random.default_rng(0).integers(0, 16, (3, 256), np.uint8)
    packed = pack(numbers)
    assert packed.shape == (3, 64) and packed.dtype == np.uint16
    for place in range(4):
        for unit in range(2):
            stored = packed[:, 32 * unit : 32 * (unit + 1)] >> 4 * place & 15
            first = 128 * unit + 32 * place
            np.testing.assert_array_equal(stored, numbers[:, first : first + 32])
