"""grouped_matmul and its kernel against NumPy, with one row of NaN and NaN between groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import check, operands, product
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.model_shapes import SHAPES
from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_reference,
    why_not_kernel,
)
from jaxspec.weight import Dense

BFLOAT16 = jnp.bfloat16
KIMI = SHAPES["kimi-linear-48b-a3b"].config()["linear_attn_config"]
RANK, CHANNELS = KIMI["head_dim"], KIMI["num_heads"] * KIMI["head_dim"]


def groups(tokens, inner, outer, dtype, *, count=2, gap=64):
    """Tokens whose columns before, between and after the groups are NaN; starts and arrays."""
    starts = [gap + group * (inner + gap) for group in range(count)]
    x = np.full((tokens, starts[-1] + inner + gap), np.nan)
    arrays = []
    for group, start in enumerate(starts):
        part, _ = operands(tokens, inner, outer, jnp.float32)
        x[:, start : start + inner] = np.asarray(part) * (1 + group)
        arrays.append(operands(tokens, inner, outer * (1 + group), dtype)[1][:, -outer:])
    return jnp.asarray(x, dtype), tuple(starts[::-1]), tuple(arrays)


def assert_are_products(ys, x, starts, arrays):
    assert len(ys) == len(arrays)
    for y, start, weight in zip(ys, starts, arrays, strict=True):
        assert y.dtype == x.dtype
        check(y, product(x[:, start : start + weight.shape[0]], weight), x.dtype)


@pytest.mark.parametrize("op", [grouped_matmul, grouped_matmul_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, BFLOAT16])
def test_the_op_is_the_product_of_each_group(op, dtype):
    x, starts, arrays = groups(5, 48, 24, dtype)
    assert_are_products(op(x, starts, [Dense(each) for each in arrays]), x, starts, arrays)


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "count", "dtype"),
    [(1, 128, 192, 2, BFLOAT16), (3, 64, 64, 3, jnp.float16), (8, 320, 128, 1, BFLOAT16)],
)
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, tokens, inner, outer, count, dtype
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.grouped_matmul_kernel import grouped_matmul_kernel

    x, starts, arrays = groups(tokens, inner, outer, dtype, count=count)
    ys = grouped_matmul_kernel(x, arrays, starts=starts, interpret=interpreter)
    assert_are_products(ys, x, starts, arrays)
    assert not get_races().races_found


@pytest.mark.mosaic
def test_the_kernel_of_kimi_linear_compiles_without_spills(h200, monkeypatch, capfd):
    from jaxspec.pallas.matmul.grouped_matmul_kernel import grouped_matmul_kernel

    def step(x, first, second):
        return grouped_matmul_kernel(x, (first, second), starts=(12_416, 12_288))

    weight = array(RANK, CHANNELS, dtype=BFLOAT16)
    operands = array(8, 12_608, dtype=BFLOAT16), weight, weight
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", range(1, 9))
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(tokens):
    dispatch._chosen.pop("grouped_matmul", None)
    x, starts, arrays = groups(tokens, RANK, CHANNELS, BFLOAT16)
    ys = jax.jit(lambda x, *arrays: grouped_matmul(x, starts, [Dense(a) for a in arrays]))(
        x, *arrays
    )
    assert_are_products(ys, x, starts, arrays)
    assert dispatch.implementations()["grouped_matmul"] == ("kernel",)


@pytest.mark.parametrize(
    ("tokens", "sizes", "starts", "columns", "why"),
    [
        (8, [(128, 4096)] * 2, (0, 128), 256, None),
        (9, [(128, 4096)] * 2, (0, 128), 256, "not 1 to 8 rows"),
        (1, [(128, 4096), (128, 64)], (0, 128), 256, "weights of several sizes"),
        (1, [(96, 64)], (0,), 256, "weights of 96 x 64"),
        (1, [(128, 96)], (0,), 256, "weights of 128 x 96"),
        (1, [(576, 64)], (0,), 576, "weights of 576 x 64"),
        (1, [(128, 64)], (32,), 256, "columns from (32,) on of 256"),
        (1, [(128, 64)], (0,), 257, "columns from (0,) on of 257"),
    ],
)
def test_the_kernel_declines_what_it_cannot_take(tokens, sizes, starts, columns, why):
    weights = [Dense(array(*size, dtype=BFLOAT16)) for size in sizes]
    assert why_not_kernel(array(tokens, columns, dtype=BFLOAT16), starts, weights) == why


def test_other_dtypes_are_declined():
    weight = Dense(array(128, 64))
    assert why_not_kernel(array(1, 128), (0,), [weight]) == "float32 and float32"


def test_columns_that_are_not_there_are_refused():
    weight = Dense(jnp.zeros((16, 8)))
    for start in (-8, 9):
        with pytest.raises(ValueError, match=f"columns of x from {start} on, and x has 24"):
            grouped_matmul(jnp.zeros((2, 24)), (0, start), (weight, weight))
    for starts, weights in (((0,), (weight, weight)), ((), ())):
        said = f"needs a start, got {len(starts)} starts and {len(weights)} weights"
        with pytest.raises(ValueError, match=said):
            grouped_matmul(jnp.zeros((2, 24)), starts, weights)


def test_no_rows_give_no_rows():
    weight = Dense(jnp.zeros((16, 8)))
    assert [y.shape for y in grouped_matmul(jnp.zeros((0, 24)), (8, 0), [weight] * 2)] == [
        (0, 8)
    ] * 2
