"""split_matmul, also behind gates, against NumPy; kernels = references, with a row of NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import gated_norm
from products import LOST, check, operands, product

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import access
from jaxspec.pallas.matmul.few_rows import parts_of
from jaxspec.pallas.matmul.split_matmul import (
    _cannot_gate,
    _unsupported,
    gated_matmul,
    gated_matmul_reference,
    gated_norm_matmul,
    gated_norm_matmul_reference,
    split_matmul,
    split_matmul_reference,
)
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.norm.residual import whole

EPS = 1e-6
SPARE = 8  # columns behind the gates


def heads_of(tokens, heads, dim, outer, dtype, first=64):
    """Heads, their norm with gates behind `first` columns that are not numbers, and a weight."""
    rng = np.random.default_rng(heads)
    x = rng.normal(size=(tokens, heads, dim)) * np.exp(rng.normal(size=(tokens, heads, 1)))
    x[LOST : LOST + 1, :, dim // 3] = np.nan
    gates = np.full((tokens, first + heads * dim + SPARE), np.nan)
    gates[:, first : first + heads * dim] = 3 * rng.normal(size=(tokens, heads * dim))
    weight = rng.normal(size=(heads * dim, outer)) * (heads * dim) ** -0.5
    norm = jnp.asarray(rng.normal(size=dim), jnp.float32)
    gates, weight = jnp.asarray(gates, dtype), jnp.asarray(weight, dtype)
    return jnp.asarray(x, jnp.float32), GatedNorm(gates, norm, first=first, eps=EPS), weight


def gated(x):
    """In float64, rounded at last."""
    gate, other = np.split(np.asarray(x, np.float64), 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * other).astype(x.dtype).astype(np.float64)


def assert_is_product(delta, x, weight):
    """`delta` is `x @ weight`, whole or in parts; `x` in float64."""
    dtype = weight.dtype
    assert delta.dtype == (dtype if delta.ndim == 2 else jnp.float32)
    check(whole(delta, dtype), product(x, weight), dtype)


@pytest.mark.parametrize("op", [split_matmul, split_matmul_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product(op, dtype):
    x, weight = operands(5, 48, 16, dtype)
    assert_is_product(op(x, weight), np.asarray(x, np.float64), weight)


@pytest.mark.parametrize("op", [gated_matmul, gated_matmul_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product_of_what_is_gated(op, dtype):
    x, _ = operands(5, 96, 16, dtype)
    _, weight = operands(5, 48, 16, dtype)
    whole_delta = jax.jit(op)(x, weight)  # or XLA would round the gates, too
    assert_is_product(whole_delta, gated(x), weight)


@pytest.mark.parametrize("op", [gated_norm_matmul, gated_norm_matmul_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_is_the_product_of_heads_normed_and_gated(op, dtype):
    heads, norm, weight = heads_of(5, 3, 16, 24, dtype)
    assert_is_product(op(heads, norm, weight), gated_norm(heads, norm), weight)


@pytest.mark.parametrize("op", [gated_norm_matmul, gated_norm_matmul_reference])
def test_what_is_normed_already_is_multiplied(op):
    heads, norm, weight = heads_of(5, 3, 16, 24, jnp.bfloat16)
    normed = norm(heads)
    assert_is_product(op(normed, norm, weight), np.asarray(normed, np.float64), weight)


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "dtype"),
    [
        (1, 448, 1024, jnp.bfloat16),
        (3, 1024, 1024, jnp.float16),
        (8, 512, 2048, jnp.bfloat16),
        (5, 64 * 27, 2048, jnp.bfloat16),  # in chunks of 64 features
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
        (3, 1024, 96, jnp.bfloat16),  # half a block's columns are none
        (8, 2048, 192, jnp.float16),
        (5, 2048, 64, jnp.bfloat16),
    ],
)
def test_the_whole_product_equals_the_oracle_without_races(
    monkeypatch, interpreter, tokens, inner, outer, dtype
):
    """Also where two blocks share a multiprocessor, and the ring is refilled."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.split_matmul_kernel import matmul_kernel

    monkeypatch.setattr(access, "MULTIPROCESSORS", 2)
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
def test_the_gating_kernel_equals_the_oracle_without_races(
    interpreter, tokens, inner, outer, dtype
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.split_matmul_kernel import gated_matmul_kernel

    x, _ = operands(tokens, 2 * inner, 64, dtype)
    _, weight = operands(tokens, inner, outer, dtype)
    y = gated_matmul_kernel(x, weight, interpret=interpreter)
    assert y.ndim == 3 and y.shape[0] > 1
    assert_is_product(y, gated(x), weight)
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


@pytest.mark.parametrize(
    ("inner", "outer", "unit", "parts"),
    [(3584, 1024, 512, 7), (2048, 1024, 256, 8), (6144, 2048, 512, 4), (2048, 2048, 256, 4)],
)
def test_every_multiprocessor_has_a_block(inner, outer, unit, parts):
    assert parts_of(inner, outer, unit=unit) == parts


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("model", ["qwen3.5-0.8b", "qwen3.5-2b"])
def test_on_a_gpu_the_ops_are_their_kernels_and_equal_the_oracle(model, tokens):
    ops = "split_matmul", "gated_matmul", "gated_norm_matmul"
    for op in ops:
        dispatch._chosen.pop(op, None)
    shape, outer = GDN["qwen3.5-0.8b"], HIDDEN[model]
    x, weight = operands(tokens, 2048, outer, jnp.bfloat16)
    assert_is_product(jax.jit(split_matmul)(x, weight), np.asarray(x, np.float64), weight)
    x, _ = operands(tokens, 2 * INTERMEDIATE[model], 64, jnp.bfloat16)
    _, weight = operands(tokens, INTERMEDIATE[model], outer, jnp.bfloat16)
    assert_is_product(jax.jit(gated_matmul)(x, weight), gated(x), weight)
    dims = shape.value_heads, shape.value_dim, outer
    heads, norm, weight = heads_of(tokens, *dims, jnp.bfloat16, first=shape.conv_dim)
    y = jax.jit(gated_norm_matmul)(heads, norm, weight)
    assert_is_product(y, gated_norm(heads, norm), weight)
    for op in ops:
        assert dispatch.implementations()[op] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_wider_models_run_the_reference():
    dispatch._chosen.pop("split_matmul", None)
    x, weight = operands(3, 512, 4096, jnp.bfloat16)
    assert_is_product(split_matmul(x, weight), np.asarray(x, np.float64), weight)
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
def test_what_the_norming_kernel_takes(heads, dim, first, why):
    x, norm, weight = heads_of(1, heads, dim, 1024, jnp.bfloat16, first)
    assert _unsupported(x, norm, weight) == why


@pytest.mark.parametrize("outer", [1024, 2048])
def test_a_block_gates_no_more_than_its_registers_hold(outer):
    for inner in range(512, 8193, 512):
        x, weight = jnp.zeros((1, 2 * inner), jnp.bfloat16), jnp.zeros((inner, outer), jnp.bfloat16)
        part = inner // parts_of(inner, outer, unit=512)
        assert _cannot_gate(x, weight) == (None if part <= 1536 else f"{inner} gates")
    assert _cannot_gate(x[:, : 2 * 3584 + 128], weight[: 3584 + 64]) == "3648 gates"
    assert _cannot_gate(jnp.zeros((9, 1024), jnp.bfloat16), weight[:512]) == "not 1 to 8 rows"


def test_operands_that_do_not_fit_are_refused():
    heads, weight = jnp.zeros((2, 4, 16)), jnp.zeros((64, 8))
    with pytest.raises(ValueError, match="a row for each of the 48 features, but this one is 64"):
        split_matmul(jnp.zeros((2, 48)), weight)
    with pytest.raises(ValueError, match="a row for each of the 48 features, but this one is 64"):
        gated_matmul(jnp.zeros((2, 96)), weight)
    with pytest.raises(ValueError, match="as many gates as others, but 129 columns"):
        gated_matmul(jnp.zeros((2, 129)), weight)
    norms = [GatedNorm(jnp.zeros((2, x)), jnp.zeros(16), first=8, eps=1e-6) for x in (71, 72)]
    with pytest.raises(ValueError, match="columns 8 to 71, but there are 71 columns"):
        gated_norm_matmul(heads, norms[0], weight)
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 32"):
        gated_norm_matmul(heads, norms[1], weight[:32])
