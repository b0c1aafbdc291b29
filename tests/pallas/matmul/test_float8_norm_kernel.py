"""The kernel of a norm and its e4m3 numbers, against those of `add_norm` and of its result."""

import jax.numpy as jnp
import numpy as np
import pytest
from published_8bit import rows_with_nan
from races import assert_no_races
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas.matmul.float8_terms import CHUNK, rounded, split
from jaxspec.pallas.norm.rms_norm import Norm

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize(("tokens", "features"), [(3, 1024), (9, 3072)])
@pytest.mark.parametrize("parts", [0, 2])
def test_it_is_the_norm_and_the_numbers_of_it(interpreter, tokens, features, parts, terms):
    from jaxspec.pallas.matmul.float8_norm_kernel import add_norm_split_kernel
    from jaxspec.pallas.norm.add_norm_kernel import add_norm_kernel

    stream = rows_with_nan(tokens, features)
    rng = np.random.default_rng(tokens)
    pending = jnp.asarray(rng.normal(size=(max(parts, 1), tokens, features)), jnp.float32)
    pending = pending if parts else pending[0].astype(jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=features), jnp.bfloat16)
    norm = Norm(weight, 1e-6, zero_centred=True)
    total, normed, got = add_norm_split_kernel(stream, pending, norm, terms, interpret=interpreter)
    assert_no_races()
    expected = add_norm_kernel(stream, pending, norm, interpret=interpreter)
    for one, other, rtol in zip((total, normed), expected, (0, 2.0**-7), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=rtol)
    chunks = normed.astype(jnp.float32).reshape(tokens * features // CHUNK, CHUNK)
    *numbers, factor = split(chunks) if terms == 2 else rounded(chunks)
    real = ~np.isnan(np.asarray(normed, np.float32)).any(axis=1)
    assert real.sum() == tokens - 1
    for number, other in zip(got.numbers, numbers, strict=True):
        assert number.shape == (-(-tokens // 8) * 8, features)
        one = number.astype(jnp.float32)[:tokens]
        other = other.astype(jnp.float32).reshape(one.shape)
        np.testing.assert_array_equal(one[real], other[real])
        assert np.isnan(one[~real]).any(axis=1).all() or number is not got.numbers[0]
    assert got.factors.shape == (features // CHUNK, -(-tokens // 8) * 8)
    factor = factor.reshape(tokens, features // CHUNK).T
    np.testing.assert_array_equal(got.factors[:, :tokens][:, real], factor[:, real])


@pytest.mark.parametrize("features", [1024, 4096, 5120])
@pytest.mark.parametrize("terms", [2, 1])
def test_it_compiles_without_spills(h200, monkeypatch, capfd, features, terms):
    from jaxspec.pallas.matmul.float8_norm_kernel import add_norm_split_kernel

    def step(stream, pending, weight):
        norm = Norm(weight, 1e-6, zero_centred=True)
        return add_norm_split_kernel(stream, pending, norm, terms)

    stream = array(64, features, dtype=jnp.bfloat16)
    operands = stream, array(4, 64, features), array(features, dtype=jnp.bfloat16)
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)
