"""Activations as e4m3 numbers, computed by XLA, against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from published_8bit import block_experts, row_experts

from jaxspec.pallas.moe.float8_tokens import Float8Tokens, as_multiplied

F8 = ml_dtypes.float8_e4m3fn
ROWS, FEATURES, CHUNKS = 5, 300, 3


def rows_of_all_sizes():
    """Some of zeros, of numbers that differ by 2**40, with a NaN or an infinity."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)) * np.exp(3 * rng.normal(size=(ROWS, FEATURES)))
    x[1], x[2, 5], x[3, 200] = 0, np.nan, np.inf
    return jnp.asarray(x, jnp.bfloat16)


def weight_of(kind, terms):
    weight, _ = kind(1, 64, FEATURES)
    return weight.replace(terms=terms)


def in_chunks(x):
    wide = np.pad(np.asarray(x, np.float32), ((0, 0), (0, CHUNKS * 128 - FEATURES)))
    return wide.reshape(ROWS, CHUNKS, 128)


@pytest.mark.parametrize("kind", [block_experts, row_experts])
def test_two_terms_are_the_activation(kind):
    """Up to 2**-21 of the largest of 128; XLA must not simplify the low number to zero."""
    x, weight = rows_of_all_sizes(), weight_of(kind, 2)
    tokens = jax.jit(lambda x: Float8Tokens.of(x, weight))(x)
    assert tokens.numbers.shape == (ROWS, 2 * CHUNKS * 128) and tokens.terms == 2
    high, low = np.asarray(tokens.numbers.astype(jnp.float32)).reshape(2 * ROWS, CHUNKS, 128)[
        [range(0, 2 * ROWS, 2), range(1, 2 * ROWS, 2)]
    ]
    with np.errstate(invalid="ignore"):
        found = (high + low / 16) * np.asarray(tokens.factors).T[..., None]
    expected = in_chunks(x)
    for row in (0, 1, 4):
        largest = np.abs(expected[row]).max(axis=1, keepdims=True)
        assert (np.abs(found[row] - expected[row]) <= largest * 2.0**-21).all()
    assert np.isnan(found[2, 0, 5]) and np.isnan(found[3, 1, 200 - 128])
    np.testing.assert_array_equal(np.asarray(as_multiplied(x, weight))[0], np.float32(x[0]))


@pytest.mark.parametrize(("kind", "axes"), [(block_experts, 2), (row_experts, (1, 2))])
def test_one_term_is_rounded_by_the_largest_of_its_block_or_row(kind, axes):
    x, weight = rows_of_all_sizes(), weight_of(kind, 1)
    tokens = jax.jit(lambda x: Float8Tokens.of(x, weight))(x)
    wide = np.nan_to_num(in_chunks(x), nan=0, posinf=0)
    largest = np.abs(wide).max(axis=axes, keepdims=True)
    factor = np.where(largest == 0, np.float32(1), largest / np.float32(448))
    expected = (wide / factor).astype(F8).astype(np.float32) * factor
    numbers = np.asarray(tokens.numbers.astype(jnp.float32)).reshape(ROWS, CHUNKS, 128)
    with np.errstate(invalid="ignore"):
        found = numbers * np.asarray(tokens.factors).T[..., None]
    for row in (0, 1, 4):
        np.testing.assert_allclose(found[row], expected[row], rtol=1e-6)
    multiplied = np.asarray(jax.jit(lambda x: as_multiplied(x, weight))(x))
    flat = found.reshape(ROWS, CHUNKS * 128)[:, :FEATURES]
    np.testing.assert_allclose(multiplied, flat, rtol=1e-6)
    assert np.isnan(multiplied[2, 5]) and np.isnan(multiplied[3, 200])


def test_tiles_have_the_factors_of_their_tokens():
    x, weight = rows_of_all_sizes(), weight_of(block_experts, 2)
    tokens = Float8Tokens.of(x, weight)
    at = jnp.asarray([[0, 4], [4, 1], [1, 99]])  # no token has the last place
    tiled = tokens.in_tiles(tokens.numbers[jnp.minimum(at, ROWS - 1)], at)
    assert tiled.factors.shape == (3, CHUNKS, 2)
    for tile, row in np.ndindex(3, 2):
        if at[tile, row] < ROWS:
            np.testing.assert_array_equal(
                tiled.factors[tile, :, row], tokens.factors[:, at[tile, row]]
            )
