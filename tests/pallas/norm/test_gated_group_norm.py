"""GatedGroupNorm against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.norm.gated_group_norm import GatedGroupNorm

TOKENS, HEADS, DIM, FIRST, GROUPS = 5, 6, 8, 7, 2


def case(dtype=jnp.float32, *, weighted=True, groups=GROUPS, gate_first=True):
    """Heads of very different sizes, and a norm whose gates have columns of NaN on both sides."""
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(TOKENS, HEADS, DIM)) * np.exp(2 * rng.normal(size=(TOKENS, HEADS, 1)))
    gates = np.full((TOKENS, FIRST + HEADS * DIM + 2), np.nan)
    gates[:, FIRST:-2] = 3 * rng.normal(size=(TOKENS, HEADS * DIM))
    weight = jnp.asarray(rng.normal(size=HEADS * DIM), jnp.float32) if weighted else None
    norm = GatedGroupNorm(
        jnp.asarray(gates, dtype), weight, first=FIRST, groups=groups, eps=1e-2,
        gate_first=gate_first,
    )  # fmt: skip
    return jnp.asarray(heads, jnp.float32), norm


def oracle(heads, norm):
    """The formula of the three kinds, token by token and group by group."""
    y = np.asarray(heads, np.float64).reshape(len(heads), -1)
    z = np.asarray(norm.gates.astype(jnp.float32), np.float64)[:, norm.first :][:, : y.shape[1]]
    gate = z / (1 + np.exp(-z))
    if norm.weight is None:
        return y * gate

    def normed(y):
        out, size = np.empty_like(y), y.shape[1] // norm.groups
        for start in range(0, y.shape[1], size):
            part = y[:, start : start + size]
            root = np.sqrt((part**2).mean(axis=1, keepdims=True) + norm.eps)
            out[:, start : start + size] = part / root
        return out * np.asarray(norm.weight, np.float64)

    return normed(y * gate) if norm.gate_first else normed(y) * gate


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [{}, {"groups": 1}, {"gate_first": False}, {"weighted": False}],
    ids=str,
)
def test_heads_are_gated_and_normed_by_groups(kind, dtype):
    heads, norm = case(dtype, **kind)
    out = jax.jit(lambda heads, norm: norm(heads))(heads, norm)
    assert out.shape == (TOKENS, HEADS * DIM) and out.dtype == dtype
    eps = max(float(jnp.finfo(dtype).eps), 1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(heads, norm), 2 * eps, eps)


def test_a_token_that_is_nan_harms_no_other():
    heads, norm = case()
    clean = norm(heads)
    out = norm(heads.at[1].set(jnp.nan))
    assert np.isnan(out[1]).all()
    keep = np.arange(TOKENS) != 1
    np.testing.assert_array_equal(np.asarray(out)[keep], np.asarray(clean)[keep])


def test_a_split_norm_is_that_of_each_part():
    heads, norm = case()
    parts = [part(x) for part, x in zip(norm.split(2), (heads[:2], heads[2:]), strict=True)]
    np.testing.assert_allclose(jnp.concatenate(parts), norm(heads), rtol=1e-6)


def test_gates_that_lack_columns_are_refused():
    heads, norm = case()
    with pytest.raises(ValueError, match="columns 7 to 62, but there are 57 columns"):
        norm(jnp.zeros((TOKENS, HEADS + 1, DIM)))


def test_gates_of_other_tokens_are_refused():
    heads, norm = case()
    with pytest.raises(ValueError, match="gates of 4 tokens, but these are of 5"):
        norm(heads[:-1])


def test_a_weight_of_other_features_is_refused():
    heads, norm = case()
    with pytest.raises(ValueError, match="each of 40 features, but it has 48"):
        norm(heads[:, :-1])


def test_groups_that_are_not_equal_are_refused():
    heads, norm = case(groups=5)
    with pytest.raises(ValueError, match="48 features are no multiple of 5 groups"):
        norm(heads)
