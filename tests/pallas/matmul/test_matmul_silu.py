"""matmul_silu and its kernel against NumPy, with one row of NaN among the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import check, operands, product

from benchmarks.measure.shapes import HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.feed_forward import matmul_silu, matmul_silu_reference
from jaxspec.pallas.matmul.gemm import choose
from jaxspec.weight import Dense


def check_gated(y, x, weight):
    """`y` is `silu(gate) * up` in float64, where both are rounded to the dtype of `x`."""
    gate, up = np.split(product(x, weight).astype(x.dtype).astype(np.float64), 2, axis=1)
    assert y.dtype == x.dtype
    check(y, gate / (1 + np.exp(-gate)) * up, x.dtype, roundings=4)


@pytest.mark.parametrize("op", [matmul_silu, matmul_silu_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_gates_the_product(op, dtype):
    x, weight = operands(5, 48, 32, dtype)
    check_gated(op(x, Dense(weight)), x, weight)


@pytest.mark.parametrize("tokens", [16, 136])
def test_the_kernel_equals_the_oracle_without_races(interpreter, tokens):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.gemm_kernel import matmul_silu_kernel

    x, weight = operands(tokens, 192, 256, jnp.bfloat16)
    check_gated(matmul_silu_kernel(x, weight, interpret=interpreter), x, weight)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 40, 64, 128, 136, 256])
@pytest.mark.parametrize("model", HIDDEN)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(model, tokens):
    dispatch._chosen.pop("matmul_silu", None)
    inner = INTERMEDIATE[model]
    x, weight = operands(tokens, HIDDEN[model], 2 * inner, jnp.bfloat16)
    first, again = (jax.jit(matmul_silu)(x, Dense(weight)) for _ in range(2))
    # As float32, because NumPy does not take two bfloat16 NaN for equal.
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (first, again)))
    check_gated(first, x, weight)
    why, _ = choose(x, Dense(weight), HIDDEN[model], gate_up=True)
    assert why is None or model != "qwen3.5-9b"
    chosen = "kernel" if why is None else f"XLA: {why}"
    assert dispatch.implementations()["matmul_silu"] == (chosen,)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "why"),
    [
        (256, 2048, 12288, "192 blocks"),
        (64, 2048, 12288, None),
        (256, 1024, 7168, None),
        (64, 2048, 7232, "a weight of 2048 x 7232"),
    ],
)
def test_more_than_64_rows_need_a_multiprocessor_for_each_block(rows, inner, columns, why):
    x = jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16)
    weight = Dense(jax.ShapeDtypeStruct((inner, columns), jnp.bfloat16))
    assert choose(x, weight, inner, gate_up=True) == (why, None)


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 32"):
        matmul_silu(jnp.zeros((16, 64)), Dense(jnp.zeros((32, 8))))
    with pytest.raises(ValueError, match="the same number of columns, but 7 columns came"):
        matmul_silu(jnp.zeros((16, 64)), Dense(jnp.zeros((64, 7))))
