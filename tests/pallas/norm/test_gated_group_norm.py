"""GatedGroupNorm against NumPy in float64, and its kernel likewise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.norm.gated_group_norm import GatedGroupNorm

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes

TOKENS, HEADS, DIM, FIRST, GROUPS = 5, 6, 8, 7, 2


def case(dtype=jnp.float32, size=(TOKENS, HEADS, DIM), *, first=FIRST, weighted=True, **kind):
    """Heads of very different sizes, and a norm whose gates have columns of NaN on both sides."""
    rng, (tokens, number, dim) = np.random.default_rng(0), size
    heads = rng.normal(size=size) * np.exp(2 * rng.normal(size=(tokens, number, 1)))
    features = number * dim
    gates = np.full((tokens, first + features + 4), np.nan)
    gates[:, first : first + features] = 3 * rng.normal(size=(tokens, features))
    weight = jnp.asarray(rng.normal(size=features), jnp.float32) if weighted else None
    kind = {"groups": GROUPS, **kind}
    norm = GatedGroupNorm(jnp.asarray(gates, dtype), weight, first=first, eps=1e-2, **kind)
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


def check(run, heads, norm):
    """`run(norm, heads)` is the formula, rounded to the dtype of the gates."""
    out, dtype = run(norm, heads), norm.gates.dtype
    assert out.shape == (len(heads), heads.shape[1] * heads.shape[2]) and out.dtype == dtype
    eps = max(float(jnp.finfo(dtype).eps), 1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(heads, norm), 2 * eps, eps)


KINDS = [{}, {"groups": 1}, {"gate_first": False}, {"weighted": False}]
called = jax.jit(lambda norm, heads: norm(heads))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_heads_are_gated_and_normed_by_groups(kind, dtype):
    check(called, *case(dtype, **kind))


def test_a_token_that_is_nan_harms_no_other():
    heads, norm = case()
    clean = norm(heads)
    out = norm(heads.at[1].set(jnp.nan))
    assert np.isnan(out[1]).all()
    keep = np.arange(TOKENS) != 1
    np.testing.assert_array_equal(np.asarray(out)[keep], np.asarray(clean)[keep])


def test_gates_that_lack_columns_are_refused():
    heads, norm = case()
    with pytest.raises(ValueError, match="columns 7 to 62, but there are 59 columns"):
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


@pytest.mark.parametrize(
    ("dtype", "size", "kind"),
    [
        (jnp.bfloat16, (3, 16, 64), {"groups": 2}),
        (jnp.float32, (2, 24, 64), {"groups": 1, "gate_first": False}),
        (jnp.float16, (1, 16, 64), {"groups": 1, "first": 7}),
        (jnp.bfloat16, (2, 32, 80), {"groups": 2}),  # groups of 1280
        (jnp.float32, (2, 28, 64), {"groups": 2, "gate_first": False}),  # groups of 896
    ],
    ids=str,
)
def test_the_kernel_is_the_formula_without_races(interpreter, dtype, size, kind):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.norm.gated_group_norm_kernel import gated_group_norm_kernel

    def run(norm, heads):
        y = heads.reshape(len(heads), -1)
        return gated_group_norm_kernel(norm, y, interpret=interpreter)

    check(run, *case(dtype, size, **{"first": 8, **kind}))
    assert not get_races().races_found


# Heads, their channels and groups: Nemotron-3-Nano, Nemotron-3-Super, mamba2-2.7b, Granite-4-H;
# groups of 1280 and 896 are those of Nemotron-Nano-9B-v2 and 12B-v2 and of Nemotron-H-4B.
SIZES = [(64, 64, 8), (128, 64, 8), (80, 64, 1), (48, 64, 1), (128, 64, 1)]
SIZES += [(128, 80, 8), (112, 64, 8)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("number", "dim", "groups"), SIZES)
def test_it_compiles_for_an_h200_to_one_kernel(
    h200, monkeypatch, capfd, number, dim, groups, dtype
):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)
    features = number * dim
    first = features + 2 * groups * 128

    def run(heads, gates, weight):
        return GatedGroupNorm(gates, weight, first=first, groups=groups, eps=1e-5)(heads)

    gates = array(8, -(-(first + features + number) // 64) * 64, dtype=dtype)
    operands = array(8, number, dim), gates, array(features)
    compiled = compile_for(h200, monkeypatch, run, operands)
    assert_lean(compiled, capfd.readouterr().out, between=1)
    assert "fusion(" not in compiled.as_text()  # no gates cut out


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("number", "dim", "groups"), SIZES)
def test_on_a_gpu_the_op_is_its_kernel_and_is_the_formula(number, dim, groups, dtype, tokens):
    dispatch._chosen.pop("gated_group_norm", None)
    for gate_first in (True, False):
        size, kind = (tokens, number, dim), {"groups": groups, "gate_first": gate_first}
        check(called, *case(dtype, size, first=8, **kind))
    assert dispatch.implementations()["gated_group_norm"] == ("kernel",)
