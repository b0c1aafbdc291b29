"""split_matmul and its gated forms against NumPy, and their kernels, with one row of NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import gated_norm
from products import NAN_ROW, check, operands, product

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.skinny_gemm import num_parts
from jaxspec.pallas.matmul.split_matmul import (
    gated_matmul,
    gated_matmul_reference,
    gated_norm_matmul,
    gated_norm_matmul_reference,
    split_matmul,
    split_matmul_reference,
    squared_relu_matmul,
    squared_relu_matmul_reference,
    why_not_gate,
    why_not_norm,
)
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.weight import Dense

EPS = 1e-6
SPARE = 8  # columns after the gates


def heads_of(tokens, heads, dim, outer, dtype, first=64):
    """Heads, a norm whose gates come after `first` columns of NaN, and the array of a weight."""
    rng = np.random.default_rng(heads)
    x = rng.normal(size=(tokens, heads, dim)) * np.exp(rng.normal(size=(tokens, heads, 1)))
    x[NAN_ROW : NAN_ROW + 1, :, dim // 3] = np.nan
    gates = np.full((tokens, first + heads * dim + SPARE), np.nan)
    gates[:, first : first + heads * dim] = 3 * rng.normal(size=(tokens, heads * dim))
    weight = rng.normal(size=(heads * dim, outer)) * (heads * dim) ** -0.5
    norm = jnp.asarray(rng.normal(size=dim), jnp.float32)
    gates, weight = jnp.asarray(gates, dtype), jnp.asarray(weight, dtype)
    return jnp.asarray(x, jnp.float32), GatedNorm(gates, norm, first=first, eps=EPS), weight


def gated(x):
    """`silu(gate) * up` in float64, rounded once."""
    gate, up = np.split(np.asarray(x, np.float64), 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up).astype(x.dtype).astype(np.float64)


def squared(x):
    """`relu(x) ** 2` in float64, rounded once; NaN stays NaN."""
    x = np.asarray(x)
    wide = x.astype(np.float64)
    return (np.where(wide < 0, 0, wide) ** 2).astype(x.dtype).astype(np.float64)


def assert_is_product(pending, x, weight):
    """`pending` is `x @ weight`, as tokens or in parts; `x` is float64."""
    dtype = weight.dtype
    assert pending.dtype == (dtype if pending.ndim == 2 else jnp.float32)
    check(sum_parts(pending, dtype), product(x, weight), dtype)


@pytest.mark.parametrize("op", [split_matmul, split_matmul_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product(op, dtype):
    x, weight = operands(5, 48, 16, dtype)
    assert_is_product(op(x, Dense(weight)), np.asarray(x, np.float64), weight)


@pytest.mark.parametrize("op", [gated_matmul, gated_matmul_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product_of_what_is_gated(op, dtype):
    x, _ = operands(5, 96, 16, dtype)
    _, weight = operands(5, 48, 16, dtype)
    pending = jax.jit(op)(x, Dense(weight))  # without `jit` XLA rounds the gates, too
    assert_is_product(pending, gated(x), weight)


@pytest.mark.parametrize("op", [squared_relu_matmul, squared_relu_matmul_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product_of_squares(op, dtype):
    x, weight = operands(5, 48, 16, dtype)
    assert_is_product(jax.jit(op)(x, Dense(weight)), squared(x), weight)


@pytest.mark.parametrize("op", [gated_norm_matmul, gated_norm_matmul_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product_of_heads_normed_and_gated(op, dtype):
    heads, norm, weight = heads_of(5, 3, 16, 24, dtype)
    assert_is_product(op(heads, norm, Dense(weight)), gated_norm(heads, norm), weight)


@pytest.mark.parametrize("op", [gated_norm_matmul, gated_norm_matmul_reference])
def test_heads_that_are_normed_already_are_multiplied_as_they_are(op):
    heads, norm, weight = heads_of(5, 3, 16, 24, jnp.bfloat16)
    normed = norm(heads)
    assert_is_product(op(normed, norm, Dense(weight)), np.asarray(normed, np.float64), weight)


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "dtype"),
    [
        (1, 448, 1024, jnp.bfloat16),
        (3, 1024, 1024, jnp.float16),
        (8, 512, 2048, jnp.bfloat16),
        (5, 64 * 27, 2048, jnp.bfloat16),  # in chunks of 64 features
        (2, 512, 2688, jnp.bfloat16),
        (1, 512, 2304, jnp.bfloat16),
    ],
)
def test_the_kernel_equals_the_oracle_without_races(interpreter, tokens, inner, outer, dtype):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.split_matmul_kernel import split_matmul_kernel

    x, weight = operands(tokens, inner, outer, dtype)
    y = split_matmul_kernel(x, weight, interpret=interpreter)
    assert y.ndim == 3 and y.shape[0] > 1
    assert_is_product(y, np.asarray(x, np.float64), weight)
    assert not get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "dtype"),
    [
        (3, 1024, 96, jnp.bfloat16),  # half of a block's columns are not real
        (8, 2048, 192, jnp.float16),
        (5, 2048, 64, jnp.bfloat16),
    ],
)
def test_the_product_that_is_not_split_equals_the_oracle_without_races(
    monkeypatch, interpreter, tokens, inner, outer, dtype
):
    """With two multiprocessors two blocks share one, and the ring is refilled."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.split_matmul_kernel import matmul_kernel

    monkeypatch.setattr(device, "MULTIPROCESSORS", 2)
    x, weight = operands(tokens, inner, outer, dtype)
    y = matmul_kernel(x, weight, interpret=interpreter)
    assert y.shape == (tokens, outer)
    assert_is_product(y, np.asarray(x, np.float64), weight)
    assert not get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "dtype"),
    [
        (1, 1024, 1024, jnp.bfloat16),
        (3, 1536, 1024, jnp.float16),
        (8, 1536, 2048, jnp.bfloat16),
    ],
)
def test_the_activating_kernels_equal_the_oracle_without_races(
    interpreter, tokens, inner, outer, dtype
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul import split_matmul_kernel as kernels

    x, _ = operands(tokens, 2 * inner, 64, dtype)
    _, weight = operands(tokens, inner, outer, dtype)
    y = kernels.gated_matmul_kernel(x, weight, interpret=interpreter)
    assert y.ndim == 3 and y.shape[0] > 1
    assert_is_product(y, gated(x), weight)
    up = x[:, :inner]
    y = kernels.squared_relu_matmul_kernel(up, weight, interpret=interpreter)
    assert_is_product(y, squared(up), weight)
    assert not get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "outer", "dtype"),
    [
        (1, 4, 128, 1024, jnp.bfloat16),
        (3, 8, 128, 2048, jnp.float16),
        (8, 8, 64, 1024, jnp.bfloat16),
    ],
)
def test_the_norming_kernel_equals_the_oracle_without_races(
    interpreter, tokens, heads, dim, outer, dtype
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.split_matmul_kernel import gated_norm_matmul_kernel

    x, norm, weight = heads_of(tokens, heads, dim, outer, dtype)
    y = gated_norm_matmul_kernel(x, norm, weight, interpret=interpreter)
    assert y.ndim == 3 and y.shape[0] > 1
    assert_is_product(y, gated_norm(x, norm), weight)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("model", ["qwen3.5-0.8b", "qwen3.5-2b"])
def test_on_a_gpu_the_ops_are_their_kernels_and_equal_the_oracle(model, tokens):
    ops = "split_matmul", "gated_matmul", "squared_relu_matmul", "gated_norm_matmul"
    for op in ops:
        dispatch._chosen.pop(op, None)
    shape, outer = GDN["qwen3.5-0.8b"], HIDDEN[model]
    x, weight = operands(tokens, 2048, outer, jnp.bfloat16)
    assert_is_product(jax.jit(split_matmul)(x, Dense(weight)), np.asarray(x, np.float64), weight)
    x, _ = operands(tokens, 2 * INTERMEDIATE[model], 64, jnp.bfloat16)
    _, weight = operands(tokens, INTERMEDIATE[model], outer, jnp.bfloat16)
    assert_is_product(jax.jit(gated_matmul)(x, Dense(weight)), gated(x), weight)
    up = x[:, : x.shape[1] // 2]
    assert_is_product(jax.jit(squared_relu_matmul)(up, Dense(weight)), squared(up), weight)
    dims = shape.value_heads, shape.value_dim, outer
    heads, norm, weight = heads_of(tokens, *dims, jnp.bfloat16, first=shape.conv_dim)
    y = jax.jit(gated_norm_matmul)(heads, norm, Dense(weight))
    assert_is_product(y, gated_norm(heads, norm), weight)
    for op in ops:
        assert dispatch.implementations()[op] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_on_a_gpu_a_model_of_2688_features_runs_the_kernel(tokens):
    dispatch._chosen.pop("split_matmul", None)
    x, weight = operands(tokens, 4096, 2688, jnp.bfloat16)
    assert_is_product(jax.jit(split_matmul)(x, Dense(weight)), np.asarray(x, np.float64), weight)
    assert dispatch.implementations()["split_matmul"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_on_a_gpu_kimi_linear_runs_the_kernels(tokens):
    for op in ("split_matmul", "gated_norm_matmul"):
        dispatch._chosen.pop(op, None)
    x, weight = operands(tokens, 4096, 2304, jnp.bfloat16)
    assert_is_product(jax.jit(split_matmul)(x, Dense(weight)), np.asarray(x, np.float64), weight)
    heads, norm, weight = heads_of(tokens, 32, 128, 2304, jnp.bfloat16, first=0)
    y = jax.jit(gated_norm_matmul)(heads, norm, Dense(weight))
    assert_is_product(y, gated_norm(heads, norm), weight)
    for op in ("split_matmul", "gated_norm_matmul"):
        assert dispatch.implementations()[op] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_wider_models_run_the_reference():
    dispatch._chosen.pop("split_matmul", None)
    x, weight = operands(3, 512, 4096, jnp.bfloat16)
    assert_is_product(split_matmul(x, Dense(weight)), np.asarray(x, np.float64), weight)
    assert dispatch.implementations()["split_matmul"] == ("XLA: 4096 features",)


@pytest.mark.parametrize(
    ("heads", "dim", "first", "why"),
    [
        (16, 128, 6144, None),
        (24, 128, 6144, "24 heads of 128"),
        (32, 32, 64, "32 heads of 32"),
        (16, 128, 4, f"gates from column 4 of {4 + 2048 + SPARE}"),
    ],
)
def test_the_norming_kernel_declines_what_it_cannot_take(heads, dim, first, why):
    x, norm, weight = heads_of(1, heads, dim, 1024, jnp.bfloat16, first)
    assert why_not_norm(x, norm, Dense(weight)) == why


@pytest.mark.parametrize("outer", [1024, 2048])
def test_a_block_gates_no_more_than_its_registers_hold(outer):
    for inner in range(512, 8193, 512):
        part = inner // num_parts(inner, outer, unit=512)
        expected = None if part <= 1536 else f"{inner} gates"
        assert why_not_gate(*shapes(1, inner, outer)) == expected


@pytest.mark.parametrize(
    ("rows", "inner", "why"), [(1, 3584 + 64, "3648 gates"), (9, 512, "not 1 to 8 rows")]
)
def test_the_gating_kernel_declines_what_it_cannot_take(rows, inner, why):
    assert why_not_gate(*shapes(rows, inner, 1024)) == why


def shapes(rows, inner, outer):
    x = jax.ShapeDtypeStruct((rows, 2 * inner), jnp.bfloat16)
    return x, Dense(jax.ShapeDtypeStruct((inner, outer), jnp.bfloat16))


def test_operands_that_do_not_fit_are_refused():
    heads, weight = jnp.zeros((2, 4, 16)), Dense(jnp.zeros((64, 8)))
    with pytest.raises(ValueError, match="a row for each of the 48 features, but this one is 64"):
        split_matmul(jnp.zeros((2, 48)), weight)
    with pytest.raises(ValueError, match="a row for each of the 48 features, but this one is 64"):
        gated_matmul(jnp.zeros((2, 96)), weight)
    with pytest.raises(ValueError, match="the same number of columns, but 129 columns"):
        gated_matmul(jnp.zeros((2, 129)), weight)
    norms = [GatedNorm(jnp.zeros((2, x)), jnp.zeros(16), first=8, eps=1e-6) for x in (71, 72)]
    with pytest.raises(ValueError, match="columns 8 to 71, but there are 71 columns"):
        gated_norm_matmul(heads, norms[0], weight)
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 32"):
        gated_norm_matmul(heads, norms[1], Dense(jnp.zeros((32, 8))))
