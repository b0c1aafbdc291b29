"""matmul_squared_relu and its kernel against NumPy, with one row of NaN among the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import check, operands, product
from races import assert_no_races

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.feed_forward import (
    matmul_squared_relu,
    matmul_squared_relu_reference,
)
from jaxspec.pallas.matmul.gemm import OneWave, choose
from jaxspec.weight import Dense

SIZES = {"nemotron-3-nano-4b": (3136, 12544), "nemotron-nano-9b-v2": (4480, 15680)}


def check_squared(y, x, weight):
    """`y` is `relu(up) ** 2` in float64, where `up` is rounded to the dtype of `x`."""
    up = product(x, weight).astype(x.dtype).astype(np.float64)
    assert y.dtype == x.dtype
    check(y, np.where(up < 0, 0, up) ** 2, x.dtype, roundings=4)


@pytest.mark.parametrize("op", [matmul_squared_relu, matmul_squared_relu_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_squares_what_is_positive(op, dtype):
    x, weight = operands(5, 48, 32, dtype)
    check_squared(op(x, Dense(weight)), x, weight)


@pytest.mark.parametrize(
    ("tokens", "wave"), [(16, None), (136, None), (72, OneWave(72, 1, 2, 1, 1))], ids=str
)
def test_the_kernel_equals_the_oracle_without_races(interpreter, tokens, wave):
    from jaxspec.pallas.matmul.gemm_kernel import matmul_squared_relu_kernel

    x, weight = operands(tokens, 192, 256, jnp.bfloat16)
    check_squared(matmul_squared_relu_kernel(x, weight, wave, interpret=interpreter), x, weight)
    assert_no_races()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 64, 128, 256])
@pytest.mark.parametrize("model", SIZES)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(model, tokens):
    dispatch._chosen.pop("matmul_squared_relu", None)
    features, inner = SIZES[model]
    x, weight = operands(tokens, features, inner, jnp.bfloat16)
    check_squared(jax.jit(matmul_squared_relu)(x, Dense(weight)), x, weight)
    why, _ = choose(x, Dense(weight), features)
    chosen = "kernel" if why is None else f"XLA: {why}"
    assert dispatch.implementations()["matmul_squared_relu"] == (chosen,)


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 32"):
        matmul_squared_relu(jnp.zeros((16, 64)), Dense(jnp.zeros((32, 8))))
