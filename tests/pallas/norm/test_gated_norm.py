"""GatedNorm against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import gated_norm

from jaxspec.pallas.norm.gated_norm import GatedNorm

TOKENS, HEADS, DIM, FIRST = 5, 3, 16, 7


def case(dtype, gate="silu"):
    """Heads of very different sizes, and a norm whose gates have columns of NaN on both sides."""
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(TOKENS, HEADS, DIM)) * np.exp(2 * rng.normal(size=(TOKENS, HEADS, 1)))
    gates = np.full((TOKENS, FIRST + HEADS * DIM + 2), np.nan)
    gates[:, FIRST:-2] = 3 * rng.normal(size=(TOKENS, HEADS * DIM))
    weight = jnp.asarray(rng.normal(size=DIM), jnp.float32)
    norm = GatedNorm(jnp.asarray(gates, dtype), weight, first=FIRST, eps=1e-2, gate=gate)
    return jnp.asarray(heads, jnp.float32), norm


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_are_normed_gated_and_rounded(dtype, gate):
    heads, norm = case(dtype, gate)
    out = jax.jit(lambda heads, norm: norm(heads))(heads, norm)
    assert out.shape == (TOKENS, HEADS * DIM) and out.dtype == dtype
    eps = max(float(jnp.finfo(dtype).eps), 1e-6)
    expected = gated_norm(heads, norm)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2 * eps, atol=eps)


def test_heads_that_are_normed_already_stay_as_they_are():
    heads, norm = case(jnp.float32)
    once = norm(heads)
    assert norm(once) is once


def test_a_split_norm_is_that_of_each_part():
    heads, norm = case(jnp.float32)
    parts = [part(x) for part, x in zip(norm.split(2), (heads[:2], heads[2:]), strict=True)]
    np.testing.assert_array_equal(jnp.concatenate(parts), norm(heads))


def test_gates_that_lack_columns_are_refused():
    _, norm = case(jnp.float32)
    norm.check(TOKENS, HEADS * DIM)
    with pytest.raises(ValueError, match="columns 7 to 70, but there are 57 columns"):
        norm.check(TOKENS, (HEADS + 1) * DIM)


def test_gates_of_other_tokens_are_refused():
    _, norm = case(jnp.float32)
    with pytest.raises(ValueError, match="gates of 6 tokens, but these are of 5"):
        norm.check(TOKENS + 1, HEADS * DIM)


def test_a_weight_of_other_heads_is_refused():
    _, norm = case(jnp.float32)
    with pytest.raises(ValueError, match="47 features are no multiple of 16"):
        norm.check(TOKENS, HEADS * DIM - 1)
