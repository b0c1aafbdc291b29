"""The kernel that makes e4m3 numbers of activations, against those of XLA, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import gated_norm
from products import NAN_ROW
from published_8bit import gated_heads_of, rows_with_nan
from races import assert_no_races

from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.float8_terms import CHUNK, LOW, rounded, split


def expected_terms(x, terms):
    """Numbers in float32 and factors by XLA, of 128 features at a time."""
    tokens, inner = x.shape
    chunks = x.astype(jnp.float32).reshape(tokens * inner // CHUNK, CHUNK)
    *numbers, factor = split(chunks) if terms == 2 else rounded(chunks)
    numbers = [np.asarray(number.astype(jnp.float32)).reshape(x.shape) for number in numbers]
    return numbers, np.asarray(factor).reshape(tokens, inner // CHUNK).T


def wide(terms, tokens):
    """The activations that `Terms` of `tokens` rows stand for, in float64."""
    numbers = [np.asarray(x.astype(jnp.float32), np.float64)[:tokens] for x in terms.numbers]
    sums = numbers[0] + LOW * numbers[1] if len(numbers) == 2 else numbers[0]
    factors = np.asarray(terms.factors, np.float64).T[:tokens]
    return sums * np.repeat(factors, CHUNK, axis=1)


@pytest.mark.parametrize(("tokens", "inner"), [(1, 128), (13, 384), (24, 640)])
@pytest.mark.parametrize("terms", [2, 1])
def test_its_numbers_are_those_of_xla_without_races(interpreter, tokens, inner, terms):
    from jaxspec.pallas.matmul.float8_split_kernel import split_kernel

    x = rows_with_nan(tokens, inner)
    got = split_kernel(x, terms, interpret=interpreter)
    assert_no_races()
    numbers, factors = expected_terms(x, terms)
    assert len(got.numbers) == terms
    real = np.arange(tokens) != NAN_ROW  # what is beside a NaN may differ
    for number, expected in zip(got.numbers, numbers, strict=True):
        assert number.dtype == jnp.float8_e4m3fn
        assert number.shape == (-(-tokens // 8) * 8, inner)
        number = number.astype(jnp.float32)[:tokens]
        np.testing.assert_array_equal(number[real], expected[real])
    assert got.factors.shape == (inner // CHUNK, -(-tokens // 8) * 8)
    np.testing.assert_array_equal(got.factors[:, :tokens][:, real], factors[:, real])
    assert_close(wide(got, tokens), np.asarray(x, np.float64), 2.0**-4 if terms == 1 else 0)


def test_blocks_of_several_chunks(monkeypatch, interpreter):
    from jaxspec.pallas.matmul import float8_split_kernel

    monkeypatch.setattr(float8_split_kernel, "_MIN_BLOCKS", 2)
    x = rows_with_nan(20, 6 * CHUNK)
    got = float8_split_kernel.split_kernel.__wrapped__(x, 2, interpret=interpreter)
    assert_no_races()
    assert_close(wide(got, 20), np.asarray(x, np.float64), 0)


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.SQUARED_RELU])
def test_the_activation_is_applied_and_rounded_first(interpreter, activation):
    from jaxspec.pallas.matmul.float8_split_kernel import activated_split_kernel

    x = rows_with_nan(11, 256 * activation.pieces)
    got = wide(activated_split_kernel(x, activation, 2, interpret=interpreter), 11)
    assert_no_races()
    pieces = jnp.split(x.astype(jnp.float32), activation.pieces, axis=1)
    activated = jax.jit(lambda *x: activation.of_blocks(x).astype(jnp.bfloat16))(*pieces)
    assert_close(got, np.asarray(activated, np.float64))


def test_heads_are_normed_and_gated_first(interpreter):
    from jaxspec.pallas.matmul.float8_split_kernel import gated_norm_split_kernel

    heads, norm = gated_heads_of(10, 4, 192)
    got = wide(gated_norm_split_kernel(heads, norm, 2, interpret=interpreter), 10)
    assert_no_races()
    assert_close(got, gated_norm(heads, norm))


def assert_close(got, expected, rtol=2.0**-7):
    """Up to `rtol` of what is not tiny in its row; one row has a NaN, at the same place or more."""
    nan = np.isnan(expected)
    assert np.isnan(got[nan]).all() and (nan.any(axis=1) == np.isnan(got).any(axis=1)).all()
    np.testing.assert_array_equal(nan.any(axis=1), np.arange(len(got)) == NAN_ROW)
    real = np.arange(len(got)) != NAN_ROW
    got, expected = got[real], expected[real]
    largest = np.abs(expected).max(axis=1, keepdims=True)
    tiny = 2.0**-11 if rtol else 2.0**-21
    np.testing.assert_allclose(got / largest, expected / largest, rtol=rtol, atol=tiny)
