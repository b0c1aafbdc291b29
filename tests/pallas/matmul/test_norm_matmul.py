"""norm_matmul against NumPy; kernel = reference, a row of NaN among its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import access
from jaxspec.pallas.matmul.norm_matmul import _unsupported, norm_matmul, norm_matmul_reference

EPS = 1e-6
LOST = 1  # the row that has a NaN
PARTS = {"nothing": None, "tokens": 0, "one part": 1, "parts": 3}


def operands(tokens, features, columns, dtype, parts):
    """x, delta, norm and weight. `parts`: of delta; None for none of it, 0 for tokens."""
    rng = np.random.default_rng(columns)
    x = rng.normal(size=(tokens, features)) * np.exp(rng.normal(size=(tokens, 1)))
    x[LOST : LOST + 1, features // 3] = np.nan
    delta = rng.normal(size=(parts or 1, tokens, features)).astype(np.float32)
    if parts is None:
        delta = None
    elif not parts:
        delta = jnp.asarray(delta[0], dtype)
    weight = rng.normal(size=(features, columns)) * features**-0.5
    x, norm, weight = (jnp.asarray(a, dtype) for a in (x, rng.normal(size=features), weight))
    return x, delta if delta is None else jnp.asarray(delta), norm, weight


def rounded(x, dtype):
    return x.astype(dtype).astype(np.float64)


def oracle(x, delta, norm, weight, zero_centred):
    """In float64, but rounded to the operands' dtype where the op says so."""
    dtype, wide = x.dtype, [np.asarray(a, np.float64) for a in (x, norm, weight)]
    total, norm, weight = wide
    if delta is not None:
        delta = np.asarray(delta)
        delta = delta.sum(axis=0, dtype=np.float32).astype(dtype) if delta.ndim == 3 else delta
        total = rounded(total + delta.astype(np.float64), dtype)
    root = np.sqrt((total**2).mean(axis=1, keepdims=True) + EPS)
    return total, rounded(total / root * (norm + zero_centred), dtype) @ weight


def check(x, delta, norm, weight, run, zero_centred=True):
    """`run` is the oracle: the sum bit for bit, the product to some roundings of its operands."""
    total, y = run(x, delta, norm, EPS, weight, zero_centred=zero_centred)
    expected_total, expected = oracle(x, delta, norm, weight, zero_centred)
    assert total.dtype == y.dtype == x.dtype and y.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(total, np.float64), expected_total)
    got = np.asarray(y, np.float64)
    nan = np.isnan(got).all(axis=1)
    np.testing.assert_array_equal(nan, np.arange(len(x)) == LOST)
    eps = max(float(jnp.finfo(x.dtype).eps), 1e-6)
    np.testing.assert_allclose(got[~nan], expected[~nan], rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product_of_the_norm_of_the_rounded_sum(dtype, parts):
    case = operands(5, 48, 32, dtype, parts)
    check(*case, norm_matmul)
    check(*case, norm_matmul_reference, zero_centred=False)


@pytest.mark.parametrize(
    ("tokens", "features", "columns", "dtype", "parts"),
    [
        (1, 1024, 64, jnp.bfloat16, None),
        (2, 1024, 96, jnp.bfloat16, 0),  # half a block's columns are none
        (2, 1024, 128, jnp.float16, 1),
        (1, 1024, 128, jnp.bfloat16, 3),
        (2, 2048, 128, jnp.bfloat16, 2),  # whose ring is refilled
        (1, 2048, 96, jnp.bfloat16, 4),
        (2, 2048, 64, jnp.bfloat16, None),
    ],
)
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, tokens, features, columns, dtype, parts
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.norm_matmul_kernel import norm_matmul_kernel

    def run(x, delta, norm, eps, weight, **rule):
        return norm_matmul_kernel(x, delta, norm, weight, eps=eps, interpret=interpreter, **rule)

    check(*operands(tokens, features, columns, dtype, parts), run)
    assert not get_races().races_found


@pytest.mark.parametrize("columns", [256, 192, 160])
def test_blocks_are_twice_as_wide_where_there_would_be_too_many(monkeypatch, interpreter, columns):
    """The last has columns that there are not, up to a whole half."""
    from jaxspec.pallas.matmul.norm_matmul_kernel import norm_matmul_kernel

    monkeypatch.setattr(access, "MULTIPROCESSORS", 2)

    def run(x, delta, norm, eps, weight, **rule):
        return norm_matmul_kernel(x, delta, norm, weight, eps=eps, interpret=interpreter, **rule)

    check(*operands(2, 1024, columns, jnp.bfloat16, 2), run)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("product", ["in_proj", "gate_up"])
@pytest.mark.parametrize("model", ["qwen3.5-0.8b", "qwen3.5-2b"])
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(model, product, tokens):
    dispatch._chosen.pop("norm_matmul", None)
    shape, features = GDN["qwen3.5-0.8b"], HIDDEN[model]
    projection = shape.conv_dim + shape.value_heads * (shape.value_dim + 2)
    columns = {"in_proj": projection, "gate_up": 2 * INTERMEDIATE[model]}[product]
    for parts in (None, 0, 8192 // features):
        case = operands(tokens, features, columns, jnp.bfloat16, parts)
        check(*case, jax.jit(norm_matmul, static_argnums=3, static_argnames="zero_centred"))
    assert dispatch.implementations()["norm_matmul"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 256])
def test_on_a_gpu_more_rows_have_a_kernel_for_the_product(tokens):
    dispatch._chosen.pop("norm_matmul", None)
    run = jax.jit(norm_matmul, static_argnums=3, static_argnames="zero_centred")
    check(*operands(tokens, 1024, 5120, jnp.bfloat16, 8), run)
    assert dispatch.implementations()["norm_matmul"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_rows_that_no_tile_has_run_the_reference():
    dispatch._chosen.pop("norm_matmul", None)
    check(*operands(9, 1024, 64, jnp.bfloat16, 3), norm_matmul)
    why = "XLA: not 16 to 256 rows, in steps of 8"
    assert dispatch.implementations()["norm_matmul"] == (why,)


def test_the_kernel_takes_as_many_parts_as_there_may_be():
    for parts, why in ((4, None), (5, "5 parts")):
        x, delta, norm, weight = operands(1, 2048, 64, jnp.bfloat16, parts)
        assert _unsupported(x, delta, norm, weight) == why


def test_a_weight_for_other_features_is_refused():
    x, norm = jnp.zeros((2, 64)), jnp.zeros(64)
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 32"):
        norm_matmul(x, None, norm, 1e-6, jnp.zeros((32, 8)))
