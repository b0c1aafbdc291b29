"""The kernels for published weights in 8 bits, against float64 in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import gated_norm
from products import NAN_ROW, check
from published_8bit import blocks_of, dequantised, dequantised_rows, rows_of

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.float8 import Float8Tiling
from jaxspec.pallas.matmul.split_matmul import gated_matmul, gated_norm_matmul, split_matmul
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.weight import Float8Blocks


def rows_with_nan(tokens, inner):
    """Rows of very different sizes, some features 200 times as large, one row with a NaN."""
    rng = np.random.default_rng(inner)
    x = rng.normal(size=(tokens, inner)) * np.exp(2 * rng.normal(size=(tokens, 1)))
    x[:, rng.integers(0, inner, 3)] *= 200
    x[NAN_ROW : NAN_ROW + 1, inner // 3] = np.nan
    return jnp.asarray(x, jnp.bfloat16)


def assert_is_product(y, x, matrix):
    """`y`, in parts or not, is `x @ matrix`: up to float32 sums, or rounded to bfloat16."""
    dtype = y.dtype
    y = np.asarray(y, np.float64)
    y, expected = y.sum(axis=0) if y.ndim == 3 else y, np.asarray(x, np.float64) @ matrix
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=1e-300)
    check(y / largest, expected / largest, dtype, roundings=4 if dtype == jnp.float32 else 1)


def races():
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    return get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "inner", "outers", "tiling"),
    [
        (1, 512, (64,), Float8Tiling(8, 1, 1, 1)),
        (3, 1536, (192, 192), Float8Tiling(8, 1, 1, 2)),  # parts end in half a block
        (8, 2560, (64,), Float8Tiling(8, 1, 1, 3)),  # parts of 6 or 7 chunks
        (13, 512, (64, 64), Float8Tiling(16, 1, 1, 1)),
        (20, 1024, (192, 64), Float8Tiling(24, 1, 2, 2)),  # a warpgroup for each half
        (100, 512, (128,), Float8Tiling(56, 2, 2, 1)),
    ],
)
def test_the_kernel_equals_the_oracle_without_races(interpreter, tokens, inner, outers, tiling):
    from jaxspec.pallas.matmul.float8_kernel import split_matmul_kernel

    x, (weight, parts) = rows_with_nan(tokens, inner), blocks_of(inner, *outers)
    y = split_matmul_kernel(x, weight, tiling=tiling, interpret=interpreter)
    assert y.dtype == (jnp.float32 if tiling.parts > 1 else jnp.bfloat16)
    assert_is_product(y, x, dequantised(parts))
    assert not races()


@pytest.mark.parametrize("tokens", [2, 24])
def test_the_ring_is_refilled(monkeypatch, interpreter, tokens):
    from jaxspec.pallas.matmul import float8_kernel

    monkeypatch.setattr(float8_kernel, "_MAX_STAGES", 4)
    x, (weight, parts) = rows_with_nan(tokens, 2048), blocks_of(2048, 128)
    run = float8_kernel.split_matmul_kernel.__wrapped__
    tiling = Float8Tiling.of(tokens, 2048, 128)._replace(parts=2)
    assert_is_product(run(x, weight, tiling=tiling, interpret=interpreter), x, dequantised(parts))
    assert not races()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_scale_per_column_is_applied_at_the_end(interpreter, parts):
    from jaxspec.pallas.matmul.float8_kernel import matmul_kernel, split_matmul_kernel

    x, weight = rows_with_nan(5, 384), rows_of(384, 192)
    expected = dequantised_rows(weight)
    tiling = Float8Tiling(8, 1, 1, parts)
    y = split_matmul_kernel(x, weight, tiling=tiling, interpret=interpreter)
    assert_is_product(y, x, expected)
    assert_is_product(matmul_kernel(x, weight, interpret=interpreter), x, expected)
    assert not races()


@pytest.mark.parametrize("activation", Activation)
def test_the_activation_is_applied_and_rounded_first(interpreter, activation):
    from jaxspec.pallas.matmul.float8_kernel import activated_matmul_kernel

    x = rows_with_nan(3, 1024 * activation.pieces)
    weight, parts = blocks_of(1024, 64)
    tiling = Float8Tiling(8, 1, 1, 2)
    y = activated_matmul_kernel(x, weight, activation, tiling=tiling, interpret=interpreter)
    wide = jnp.split(x.astype(jnp.float32), activation.pieces, axis=1)
    # As a program: XLA's exponential may differ by a rounding otherwise.
    activated = jax.jit(lambda *x: activation.of_blocks(x).astype(jnp.bfloat16))(*wide)
    y, expected = np.asarray(y, np.float64).sum(axis=0), np.asarray(activated, np.float64)
    expected = expected @ dequantised(parts)
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=1e-300)
    check(y / largest, expected / largest, jnp.bfloat16)  # a gate may round the other way
    assert not races()


def heads_of(tokens, heads, first):
    rng = np.random.default_rng(heads)
    x = rng.normal(size=(tokens, heads, 128)) * np.exp(rng.normal(size=(tokens, heads, 1)))
    x[NAN_ROW : NAN_ROW + 1, :, 40] = np.nan
    gates = np.full((tokens, first + heads * 128 + 8), np.nan)
    gates[:, first : first + heads * 128] = 3 * rng.normal(size=(tokens, heads * 128))
    weight = jnp.asarray(rng.normal(size=128), jnp.float32)
    norm = GatedNorm(jnp.asarray(gates, jnp.bfloat16), weight, first=first, eps=1e-6)
    return jnp.asarray(x, jnp.float32), norm


def test_heads_are_normed_and_gated_first(interpreter):
    from jaxspec.pallas.matmul.float8_kernel import gated_norm_matmul_kernel

    heads, norm = heads_of(5, 8, 72)
    weight, parts = blocks_of(1024, 128)
    y = gated_norm_matmul_kernel(
        heads, norm, weight, tiling=Float8Tiling(8, 1, 1, 2), interpret=interpreter
    )
    y, expected = np.asarray(y, np.float64).sum(axis=0), gated_norm(heads, norm)
    check(y, expected @ dequantised(parts), jnp.bfloat16)
    assert not races()


def inverted_scale(weight):
    return Float8Blocks(weight.array, 1 / weight.scale)


def scale_of_the_next_columns(weight):
    return Float8Blocks(weight.array, jnp.roll(weight.scale, 1, axis=0))


def scale_of_the_next_features(weight):
    return Float8Blocks(weight.array, jnp.roll(weight.scale, 1, axis=1))


@pytest.mark.parametrize(
    "bug", [inverted_scale, scale_of_the_next_columns, scale_of_the_next_features]
)
def test_a_planted_bug_of_scales_is_seen(interpreter, bug):
    from jaxspec.pallas.matmul.float8_kernel import matmul_kernel

    x, (weight, parts) = rows_with_nan(3, 512), blocks_of(512, 192)
    with pytest.raises(AssertionError):
        y = matmul_kernel(x, bug(weight), interpret=interpreter)
        assert_is_product(y, x, dequantised(parts))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 40, 64, 256, 700])
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(tokens):
    """Tensor cores sum 128 features with about 14 bits."""
    dispatch._chosen.pop("split_matmul", None)
    x, (weight, parts) = rows_with_nan(tokens, 4096), blocks_of(4096, 1024)
    y = np.asarray(jax.jit(split_matmul)(x, weight), np.float64)
    y, expected = y.sum(axis=0) if y.ndim == 3 else y, np.asarray(x, np.float64)
    expected = expected @ dequantised(parts)
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=1e-300)
    check(y / largest, expected / largest, jnp.bfloat16, roundings=1)
    assert dispatch.implementations()["split_matmul"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_on_a_gpu_what_precedes_the_matmul_is_in_its_kernel(tokens):
    for op in ("gated_matmul", "gated_norm_matmul"):
        dispatch._chosen.pop(op, None)
    heads, norm = heads_of(tokens, 32, 8192)
    weight, parts = blocks_of(4096, 1024)
    y = np.asarray(jax.jit(gated_norm_matmul)(heads, norm, weight), np.float64).sum(axis=0)
    check(y, gated_norm(heads, norm) @ dequantised(parts), jnp.bfloat16)
    x = rows_with_nan(tokens, 8192)
    wide = np.split(np.asarray(x, np.float64), 2, axis=1)
    gated = np.asarray(jnp.asarray(Activation.SWIGLU.of_blocks(wide), jnp.bfloat16), np.float64)
    y = np.asarray(jax.jit(gated_matmul)(x, weight), np.float64).sum(axis=0)
    expected = gated @ dequantised(parts)
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=1e-300)
    check(y / largest, expected / largest, jnp.bfloat16)
    assert dispatch.implementations()["gated_matmul"] == ("kernel",)
    assert dispatch.implementations()["gated_norm_matmul"] == ("kernel",)
