"""matmul_silu against NumPy; kernel = reference, with a row of NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import check, operands, product

from benchmarks.measure.shapes import HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.gemm import choose
from jaxspec.pallas.matmul.matmul_silu import matmul_silu, matmul_silu_reference


def check_gated(y, x, weight):
    """In float64, but gates and others rounded as the op says."""
    gate, other = np.split(product(x, weight).astype(x.dtype).astype(np.float64), 2, axis=1)
    assert y.dtype == x.dtype
    check(y, gate / (1 + np.exp(-gate)) * other, x.dtype, roundings=4)


@pytest.mark.parametrize("op", [matmul_silu, matmul_silu_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op_gates_the_product(op, dtype):
    x, weight = operands(5, 48, 32, dtype)
    check_gated(op(x, weight), x, weight)


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
    first, again = (jax.jit(matmul_silu)(x, weight) for _ in range(2))
    # NumPy does not take two bfloat16 NaN for equal.
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (first, again)))
    check_gated(first, x, weight)
    why, _ = choose(x, weight, HIDDEN[model], gates=True)
    assert why is None or model != "qwen3.5-9b"
    chosen = "kernel" if why is None else f"XLA: {why}"
    assert dispatch.implementations()["matmul_silu"] == (chosen,)


def test_of_many_rows_the_kernel_wants_a_multiprocessor_for_each_block():
    x, weight = jnp.zeros((256, 2048), jnp.bfloat16), jnp.zeros((2048, 12288), jnp.bfloat16)
    assert choose(x, weight, 2048, gates=True) == ("192 blocks", None)
    assert choose(x[:64], weight, 2048, gates=True) == (None, None)
    assert choose(x[:, :1024], weight[:1024, :7168], 1024, gates=True) == (None, None)
    why, _ = choose(x[:64], weight[:, :7232], 2048, gates=True)
    assert why == "a weight of 2048 x 7232"


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="a row for each of the 64 features, but this one is 32"):
        matmul_silu(jnp.zeros((16, 64)), jnp.zeros((32, 8)))
    with pytest.raises(ValueError, match="as many gates as others, but 7 columns came"):
        matmul_silu(jnp.zeros((16, 64)), jnp.zeros((64, 7)))
