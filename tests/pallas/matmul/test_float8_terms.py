"""An activation as two e4m3 numbers, which are exact, or as one, which is the nearest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_8bit import blocks_of, rows_of
from sm90 import compile_for

from jaxspec.pallas.matmul.float8_terms import CHUNK, as_multiplied, split
from jaxspec.pallas.matmul.float8_terms import rounded as in_8_bits

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


def w8a8(x, size):
    """Each row's `size` features by their largest / 448, in NumPy and float64."""
    result = np.array(x, np.float64)
    for row in result:
        for first in range(0, row.size, size):
            part = row[first : first + size]
            scale = np.abs(part).max() / 448
            if scale:
                eight = jnp.asarray(part / scale, jnp.float32).astype(F8)
                part[:] = np.asarray(eight.astype(jnp.float32), np.float64) * scale
    return result


@pytest.mark.few(2)
@pytest.mark.parametrize("inner", [128, 384, 200])
@pytest.mark.parametrize("of_blocks", [True, False])
def test_one_term_is_the_nearest_e4m3_number_of_its_features(inner, of_blocks):
    """Only numbers halfway between two may differ, by one rounding of their quotient."""
    rng = np.random.default_rng(inner)
    x = rng.normal(size=(20, inner)) * np.exp(3 * rng.normal(size=(20, 1)))
    x[:, 5], x[3] = x[:, 5] * 200, 0
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    weight = blocks_of(inner, 64)[0] if of_blocks else rows_of(inner, 64)
    one = dataclasses.replace(weight, terms=1)
    got = np.asarray(as_multiplied(jnp.asarray(x, jnp.bfloat16), one), np.float64)
    expected = w8a8(x, 128 if of_blocks else inner)
    is_close = np.isclose(got, expected, rtol=1e-6, atol=0)
    assert is_close.mean() > 0.999
    np.testing.assert_allclose(got, expected, rtol=2.0**-3)
    assert not (got[3] != 0).any()
    assert (np.abs(got - x).max(axis=1) <= np.abs(x).max(axis=1) * 2.0**-4).all()
    np.testing.assert_array_equal(as_multiplied(jnp.asarray(x, jnp.bfloat16), weight), x)


@pytest.mark.parametrize("size", [2.0**-133, 2.0**-124, 2.0**-100, 1.0, 2.0**120])
def test_one_term_of_the_smallest_and_largest_numbers(size):
    """Subnormal numbers may become zeros."""
    x = np.linspace(-1, 1, CHUNK)[None] * size
    number, factor = in_8_bits(jnp.asarray(x, jnp.float32))
    wide = np.asarray(number.astype(jnp.float32), np.float64) * np.asarray(factor, np.float64)
    assert np.abs(wide - x).max() <= max(size * 2.0**-4, 2.0**-117)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of_blocks", [True, False])
def test_one_term_of_what_is_not_finite_stays_in_its_row(bad, of_blocks):
    x = np.ones((3, 256), np.float32)
    x[1, 7] = bad
    weight = blocks_of(256, 64)[0] if of_blocks else rows_of(256, 64)
    nan = np.isnan(as_multiplied(jnp.asarray(x), dataclasses.replace(weight, terms=1)))
    assert nan[1, 7] and not nan[[0, 2]].any()


def test_rounded_activations_stay_rounded_in_a_program_for_a_gpu(h200, monkeypatch):
    """XLA for GPUs removes a conversion to 8 bits and back, and XLA for CPUs does not."""
    weight = dataclasses.replace(blocks_of(256, 64)[0], terms=1)
    operands = [jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)]
    compiled = compile_for(h200, monkeypatch, lambda x: as_multiplied(x, weight), operands)
    assert "reduce-precision(" in compiled.as_text()
