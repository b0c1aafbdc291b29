"""norm_matmul and its kernel against NumPy, with one row of NaN among the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.norm_matmul import norm_matmul, norm_matmul_reference, why_not_skinny
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense

EPS = 1e-6
NAN_ROW = 1
PENDING = {"nothing": None, "tokens": 0, "one part": 1, "parts": 3}


def operands(tokens, features, columns, dtype, parts, *, zero_centred=True):
    """A stream, what is pending, a norm and a weight.

    `parts` of None: nothing is pending; of 0: tokens are; otherwise so many partial sums.
    """
    rng = np.random.default_rng(columns)
    stream = rng.normal(size=(tokens, features)) * np.exp(rng.normal(size=(tokens, 1)))
    stream[NAN_ROW : NAN_ROW + 1, features // 3] = np.nan
    pending = jnp.asarray(rng.normal(size=(parts or 1, tokens, features)), jnp.float32)
    if parts is None:
        pending = None
    elif not parts:
        pending = pending[0].astype(dtype)
    weight = rng.normal(size=(features, columns)) * features**-0.5
    norm = Norm(jnp.asarray(rng.normal(size=features), dtype), EPS, zero_centred)
    return jnp.asarray(stream, dtype), pending, norm, Dense(jnp.asarray(weight, dtype))


def rounded(x, dtype):
    return x.astype(dtype).astype(np.float64)


def oracle(stream, pending, norm, weight):
    """Sum and product in float64, rounded to the operands' dtype where the op says so."""
    dtype = stream.dtype
    total, scale, array = (np.asarray(a, np.float64) for a in (stream, norm.weight, weight.array))
    if pending is not None:
        pending = np.asarray(pending)
        if pending.ndim == 3:
            pending = pending.sum(axis=0, dtype=np.float32).astype(dtype)
        total = rounded(total + pending.astype(np.float64), dtype)
    root = np.sqrt((total**2).mean(axis=1, keepdims=True) + EPS)
    return total, rounded(total / root * (scale + norm.zero_centred), dtype) @ array


def check(stream, pending, norm, weight, run):
    """`run` gives the sum bit for bit, and the product up to some roundings of its operands."""
    total, y = run(stream, pending, norm, weight)
    expected_total, expected = oracle(stream, pending, norm, weight)
    assert total.dtype == y.dtype == stream.dtype and y.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(total, np.float64), expected_total)
    got = np.asarray(y, np.float64)
    nan = np.isnan(got).all(axis=1)
    np.testing.assert_array_equal(nan, np.arange(len(stream)) == NAN_ROW)
    eps = max(float(jnp.finfo(stream.dtype).eps), 1e-6)
    np.testing.assert_allclose(got[~nan], expected[~nan], rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("parts", PENDING.values(), ids=PENDING)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product_of_the_norm_of_the_rounded_sum(dtype, parts):
    check(*operands(5, 48, 32, dtype, parts), norm_matmul)
    check(*operands(5, 48, 32, dtype, parts, zero_centred=False), norm_matmul_reference)


@pytest.mark.parametrize(
    ("tokens", "features", "columns", "dtype", "parts"),
    [
        (1, 1024, 64, jnp.bfloat16, None),
        (2, 1024, 96, jnp.bfloat16, 0),  # half of a block's columns are not real
        (2, 1024, 128, jnp.float16, 1),
        (1, 1024, 128, jnp.bfloat16, 3),
        (2, 2048, 128, jnp.bfloat16, 2),  # the ring is refilled
        (1, 2048, 96, jnp.bfloat16, 4),
        (2, 2048, 64, jnp.bfloat16, None),
    ],
)
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, tokens, features, columns, dtype, parts
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    check(*operands(tokens, features, columns, dtype, parts), interpreted(interpreter))
    assert not get_races().races_found


@pytest.mark.parametrize("columns", [256, 192, 160])
def test_blocks_are_twice_as_wide_where_there_would_be_too_many(monkeypatch, interpreter, columns):
    """The last block has up to 64 columns that are not real."""
    monkeypatch.setattr(device, "MULTIPROCESSORS", 2)
    check(*operands(2, 1024, columns, jnp.bfloat16, 2), interpreted(interpreter))


def interpreted(parameters):
    from jaxspec.pallas.matmul.norm_matmul_kernel import norm_matmul_kernel

    def run(stream, pending, norm, weight):
        return norm_matmul_kernel(stream, pending, norm, weight.array, interpret=parameters)

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize(
    ("model", "product"),
    [("qwen3.5-0.8b", "in_proj"), ("qwen3.5-0.8b", "gate_up"), ("qwen3.5-2b", "in_proj")],
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(model, product, tokens):
    dispatch._chosen.pop("norm_matmul", None)
    shape, features = GDN["qwen3.5-0.8b"], HIDDEN[model]
    projection = shape.conv_dim + shape.value_heads * (shape.value_dim + 2)
    columns = {"in_proj": projection, "gate_up": 2 * INTERMEDIATE[model]}[product]
    for parts in (None, 0, 8192 // features):
        case = operands(tokens, features, columns, jnp.bfloat16, parts)
        check(*case, jax.jit(norm_matmul))
    assert dispatch.implementations()["norm_matmul"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 256])
def test_on_a_gpu_more_rows_take_a_kernel_for_the_product(tokens):
    dispatch._chosen.pop("norm_matmul", None)
    check(*operands(tokens, 1024, 5120, jnp.bfloat16, 8), jax.jit(norm_matmul))
    assert dispatch.implementations()["norm_matmul"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_nine_rows_run_the_reference():
    dispatch._chosen.pop("norm_matmul", None)
    check(*operands(9, 1024, 64, jnp.bfloat16, 3), norm_matmul)
    why = "XLA: not 16 to 256 rows, in steps of 8"
    assert dispatch.implementations()["norm_matmul"] == (why,)


@pytest.mark.parametrize(("columns", "why"), [(8448, None), (8512, "8512 columns")])
def test_few_rows_of_more_columns_than_one_wave_of_blocks_are_xla_s(columns, why):
    shapes = (1, 2048), (4, 1, 2048), (2048,), (2048, columns)
    dtypes = jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16
    stream, pending, scale, weight = map(jax.ShapeDtypeStruct, shapes, dtypes)
    assert why_not_skinny(stream, pending, Norm(scale, EPS), Dense(weight)) == why


@pytest.mark.gpu
def test_on_a_gpu_more_parts_than_a_thread_holds_are_added_first():
    dispatch._chosen.pop("norm_matmul", None)
    check(*operands(1, 2048, 64, jnp.bfloat16, 9), jax.jit(norm_matmul))
    assert dispatch.implementations()["norm_matmul"] == ("kernel",)


def test_a_weight_for_other_features_is_refused():
    stream, norm = jnp.zeros((2, 64)), Norm(jnp.zeros(64), EPS)
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 32"):
        norm_matmul(stream, None, norm, Dense(jnp.zeros((32, 8))))
