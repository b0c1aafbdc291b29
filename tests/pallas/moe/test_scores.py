"""moe_scores against NumPy, its kernels, and what XLA makes where it has none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import check, operands, product
from races import assert_no_races
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.moe.scores import moe_scores, moe_scores_reference, why_not_kernel
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.weight import Dense

OPTIMIZED = True  # as for a user


def assert_scores(scores, x, weight):
    """They are float32, and the product in float64 but for the order of sums."""
    assert scores.dtype == jnp.float32
    check(sum_parts(scores, jnp.float32), product(x, weight), jnp.float32, roundings=8)


@pytest.mark.parametrize("op", [moe_scores, moe_scores_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_are_the_product_in_float32(op, dtype):
    x, weight = operands(5, 48, 16, dtype)
    assert_scores(jax.jit(op)(x, Dense(weight)), x, weight)


def test_a_weight_for_other_features_is_refused():
    with pytest.raises(ValueError, match="a row for each of the 48 features, but this one is 64"):
        moe_scores(jnp.zeros((2, 48)), Dense(jnp.zeros((64, 8))))


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "dtype"),
    [
        (1, 448, 128, jnp.bfloat16),
        (8, 512, 64, jnp.float16),
        (3, 320, 320, jnp.bfloat16),
        (16, 320, 128, jnp.bfloat16),
        (40, 192, 64, jnp.float16),
    ],
)
def test_the_kernels_equal_the_oracle_without_races(
    monkeypatch, interpreter, tokens, inner, outer, dtype
):
    from jaxspec.pallas.matmul import gemm_kernel, split_matmul_kernel

    for module, name in (split_matmul_kernel, "split_matmul"), (gemm_kernel, "split_gemm"):
        kernel = getattr(module, f"{name}_kernel")

        def interpreted(*operands, kernel=kernel):
            return kernel(*operands, interpret=interpreter)

        monkeypatch.setattr(module, f"{name}_kernel", interpreted)
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)
    x, weight = operands(tokens, inner, outer, dtype)
    scores = moe_scores(x, Dense(weight))
    assert scores.shape == (inner // 64, tokens, outer)
    assert_scores(scores, x, weight)
    assert_no_races()


@pytest.mark.parametrize(
    ("rows", "inner", "outer", "dtype", "why"),
    [
        (1, 2688, 128, jnp.bfloat16, None),
        (8, 2048, 576, jnp.float16, None),
        (128, 2688, 128, jnp.bfloat16, None),
        (64, 2048, 320, jnp.bfloat16, "2048 features, which XLA splits as they are"),
        (1, 2688, 128, jnp.float32, "float32 and float32"),
        (1, 1000, 128, jnp.bfloat16, "scores of 1000 x 128"),
        (1, 1024, 100, jnp.bfloat16, "scores of 1024 x 100"),
        (1, 1024, 704, jnp.bfloat16, "scores of 1024 x 704"),
        (12, 2688, 128, jnp.bfloat16, "not 16 to 128 rows, in steps of 8"),
        (136, 2688, 128, jnp.bfloat16, "not 16 to 128 rows, in steps of 8"),
        (16, 64, 128, jnp.bfloat16, "scores of 64 x 128 in one part"),
    ],
)
def test_the_kernels_decline_what_they_cannot_take_or_xla_does_as_well(
    rows, inner, outer, dtype, why
):
    x, weight = (jax.ShapeDtypeStruct(dims, dtype) for dims in ((rows, inner), (inner, outer)))
    assert why_not_kernel(x, Dense(weight)) == why


@pytest.mark.parametrize("rows", [1, 8, 16, 64, 128])
def test_they_compile_to_one_kernel(h200, monkeypatch, capfd, rows):
    """Nothing is padded, copied or summed."""
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    compiled, _ = compiled_for(h200, monkeypatch, moe_scores, rows, 2688)
    assert_lean(compiled, capfd.readouterr().out)
    assert not re.findall(r" (fusion|pad|reduce)\(", compiled.as_text())


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("features", [2560, 2688, 2816, 2880, 3200, 4096])
def test_xla_pads_features_that_are_no_multiple_of_256(h200, monkeypatch, rows, features):
    """That is where `gemm`'s kernel takes its place. If this fails, there may be no need to."""
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    compiled, operands = compiled_for(h200, monkeypatch, moe_scores_reference, rows, features)
    pads = "pad_fusion" in compiled.as_text()
    assert pads == (features % 256 > 0) == (why_not_kernel(*operands) is None)


def compiled_for(h200, monkeypatch, op, rows, features):
    """The program of Nemotron-3-Nano's number of experts, and its operands."""
    dims = (rows, features), (features, 128)
    x, weight = (array(*each, dtype=jnp.bfloat16) for each in dims)
    operands = x, Dense(weight)
    return compile_for(h200, monkeypatch, op, operands), operands


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [*range(1, 9), 16, 64, 128])
@pytest.mark.parametrize(("inner", "outer"), [(2688, 128), (2880, 64), (4480, 576)])
def test_on_a_gpu_the_scores_are_a_kernel_s_and_equal_the_oracle(tokens, inner, outer):
    dispatch._chosen.pop("moe_scores", None)
    x, weight = operands(tokens, inner, outer, jnp.bfloat16)
    scores = jax.jit(moe_scores)(x, Dense(weight))
    assert scores.ndim == 3
    assert_scores(scores, x, weight)
    assert dispatch.implementations()["moe_scores"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 8, 40])
def test_on_a_gpu_a_neighbour_changes_no_bit_of_a_token(count):
    """Law 3."""
    rng = np.random.default_rng(0)
    weight = Dense(jnp.asarray(rng.normal(size=(2688, 128)), jnp.bfloat16))
    x = jnp.asarray(rng.normal(size=(count, 2688)), jnp.bfloat16)
    alone = jnp.zeros_like(x).at[0].set(x[1])
    scores, expected = (np.asarray(jax.jit(moe_scores)(some, weight)) for some in (x, alone))
    np.testing.assert_array_equal(scores[:, 1], expected[:, 0])
