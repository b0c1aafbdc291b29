"""All ops of published weights in 8 and 4 bits are those of the same numbers in 16 bits.

Then the ops with their kernels in the interpreter: which of them runs where, and the same results.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import gated_norm
from pairwise import soak
from products import NAN_ROW, check
from published_4bit import float4_of, int4_of
from published_8bit import blocks_of, dequantised, gated_heads_of, rows_of, rows_with_nan

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul import (
    float8_gemm_kernel,
    float8_kernel,
    float8_many_rows_kernel,
    float8_norm_kernel,
    float8_split_kernel,
    four_bits_kernel,
)
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul
from jaxspec.pallas.matmul.feed_forward import (
    feed_forward,
    matmul_silu,
    matmul_squared_relu,
    squared_relu_feed_forward,
)
from jaxspec.pallas.matmul.float8_terms import as_multiplied
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.split_matmul import (
    gated_matmul,
    gated_norm_matmul,
    split_matmul,
    squared_relu_matmul,
)
from jaxspec.pallas.norm import add_norm_kernel
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Columns, Dense, Float8Blocks, Float8Rows

INNER, OUTER = 512, 128
KERNELS = {
    float8_kernel: (
        "matmul_kernel",
        "split_matmul_kernel",
        "activated_matmul_kernel",
        "gated_norm_matmul_kernel",
    ),
    float8_split_kernel: ("split_kernel", "activated_split_kernel", "gated_norm_split_kernel"),
    float8_norm_kernel: ("add_norm_split_kernel",),
    float8_gemm_kernel: ("gemm_kernel",),
    float8_many_rows_kernel: ("many_rows_kernel",),
    four_bits_kernel: ("four_bits_kernel",),
    add_norm_kernel: ("add_norm_kernel",),
}


def draw(seed, *dims):
    return jnp.asarray(np.random.default_rng(seed).normal(size=dims), jnp.bfloat16)


def ops(tokens, weight_of):
    """Each op as a function of `convert`, which its weights go through."""
    x, twice = draw(0, tokens, INNER), draw(1, tokens, 2 * INNER)
    weight, up, gate_up = weight_of(INNER, OUTER), weight_of(INNER, 512), weight_of(INNER, 1024)
    norm = Norm(draw(2, INNER), 1e-6, zero_centred=True)
    heads = draw(3, tokens, 4, 128).astype(jnp.float32)
    gated = GatedNorm(twice, draw(4, 128).astype(jnp.float32), first=256, eps=1e-6)
    return {
        "norm_matmul": lambda of: norm_matmul(x, x, norm, of(weight)),
        "split_matmul": lambda of: split_matmul(x, of(weight)),
        "gated_matmul": lambda of: gated_matmul(twice, of(weight)),
        "squared_relu_matmul": lambda of: squared_relu_matmul(x, of(weight)),
        "gated_norm_matmul": lambda of: gated_norm_matmul(heads, gated, of(weight)),
        "matmul_silu": lambda of: matmul_silu(x, of(gate_up)),
        "matmul_squared_relu": lambda of: matmul_squared_relu(x, of(weight)),
        "feed_forward": lambda of: feed_forward(x, x, norm, of(gate_up), of(weight)),
        "squared_relu_feed_forward": lambda of: squared_relu_feed_forward(
            x, None, norm, of(up), of(weight)
        ),
    }


def blocks(inner, outer):
    weight, _ = blocks_of(inner, *([outer - 64, 64] if outer > 64 else [outer]))
    return Float8Blocks(weight.array, powers_of_two(weight.scale))


def rows(inner, outer):
    weight = rows_of(inner, outer)
    return Float8Rows(weight.array, powers_of_two(weight.scale))


def int4(inner, outer):
    weight, _ = int4_of(inner, outer, has_zeros=True)
    return dataclasses.replace(weight, scale=powers_of_two(weight.scale))


def float4(inner, outer):
    weight, _ = float4_of(inner, outer)
    return dataclasses.replace(weight, factor=powers_of_two(weight.factor))


ALL = [blocks, rows, int4, float4]


def powers_of_two(scale):
    """So that the weight has bfloat16 numbers."""
    return 2.0 ** jnp.round(jnp.log2(scale))


def in_16_bits(weight):
    return Dense(weight.dense().array.astype(jnp.bfloat16))


def run(op, convert):
    """All arrays that `op` returns, without parts."""
    result = jax.jit(lambda: op(convert))()
    whole = [sum_parts(part, jnp.bfloat16) for part in jax.tree.leaves(result)]
    return [np.asarray(part, np.float64) for part in whole]


def assert_same(got, expected, roundings=4):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        largest = np.abs(other).max(initial=1e-30)
        np.testing.assert_allclose(one / largest, other / largest, atol=roundings * 2.0**-8)


@pytest.mark.parametrize("weight_of", ALL)
def test_16_bits_hold_these_weights(weight_of):
    weight = weight_of(INNER, OUTER)
    rounded = in_16_bits(weight).array.astype(jnp.float32)
    np.testing.assert_array_equal(rounded, weight.dense().array)


@pytest.mark.few(4)
@pytest.mark.parametrize("weight_of", ALL)
@pytest.mark.parametrize("tokens", [1, 8, 20])
@pytest.mark.parametrize("op", ops(1, blocks))
def test_an_op_is_that_of_the_weight_in_16_bits(op, tokens, weight_of):
    run_op = ops(tokens, weight_of)[op]
    assert_same(run(run_op, lambda weight: weight), run(run_op, in_16_bits))


@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("op", ops(1, blocks))
def test_an_op_with_its_kernels_is_the_op_without(monkeypatch, interpreter, op, tokens, terms):
    run_op = ops(tokens, blocks)[op]

    def convert(weight):
        return dataclasses.replace(weight, terms=terms)

    expected = run(run_op, convert)
    launched = set(interpreted(monkeypatch, interpreter, lambda: run_op(convert), expected, terms))
    gemm, fused = set(KERNELS[float8_gemm_kernel]), set(KERNELS[float8_kernel])
    assert (fused if tokens <= 8 else gemm) & launched
    assert not (gemm if tokens <= 8 else fused) & launched
    if op.startswith(("gated", "squared", "feed")):  # what precedes a matmul is in its kernel
        assert {name for name in launched if name.startswith(("activated", "gated"))}


@pytest.mark.parametrize(("op", "terms"), [("split_matmul", 2), soak("norm_matmul", 1)])
def test_many_rows_have_their_own_kernel(monkeypatch, interpreter, op, terms):
    """With blocks of both kernels in several waves; in one wave, smaller blocks take less time."""
    monkeypatch.setattr(device, "MULTIPROCESSORS", 2)
    run_op = ops(250, blocks)[op]

    def convert(weight):
        return dataclasses.replace(weight, terms=terms)

    expected = run(run_op, convert)
    launched = interpreted(monkeypatch, interpreter, lambda: run_op(convert), expected, terms)
    assert "many_rows_kernel" in launched and "gemm_kernel" not in launched


@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_norm_of_more_rows_makes_their_numbers(monkeypatch, interpreter, parts, terms):
    """Columns in 16 bits have the norm itself."""
    x, weight = draw(0, 20, 1024), dataclasses.replace(blocks(1024, OUTER), terms=terms)
    norm = Norm(draw(2, 1024), 1e-6, zero_centred=True)
    columns = Columns((weight, Dense(draw(3, 1024, 8)))[:parts])

    def op(_):
        return norm_matmul(x, x, norm, columns if parts == 2 else weight)

    expected = run(op, None)
    launched = interpreted(monkeypatch, interpreter, lambda: op(None), expected, terms)
    assert launched == ["add_norm_split_kernel", "gemm_kernel"]


@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("op", ["split_matmul", "gated_matmul", "norm_matmul"])
def test_rows_with_one_scale_are_rounded_before_their_kernel(monkeypatch, interpreter, op, tokens):
    run_op = ops(tokens, rows)[op]

    def convert(weight):
        return dataclasses.replace(weight, terms=1)

    expected = run(run_op, convert)
    launched = interpreted(monkeypatch, interpreter, lambda: run_op(convert), expected, 1)
    assert [name for name in launched if name != "add_norm_kernel"] == ["gemm_kernel"]


@pytest.mark.few(6)
@pytest.mark.parametrize("weight_of", [int4, float4])
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("op", ops(1, blocks))
def test_all_matmuls_in_4_bits_are_one_kernel(monkeypatch, interpreter, op, tokens, weight_of):
    run_op = ops(tokens, weight_of)[op]
    expected = run(run_op, lambda weight: weight)
    launched = interpreted(monkeypatch, interpreter, lambda: run_op(lambda w: w), expected, 2)
    assert set(launched) - {"add_norm_kernel"} == {"four_bits_kernel"}


def interpreted(monkeypatch, parameters, op, expected, terms):
    """Run the kernels of published weights in the interpreter; return the names of those run.

    The result is `expected`, up to roundings of what is rounded to 8 bits later, if anything is.
    """
    launched = []

    def replaced(name, kernel, *operands, tiling=None, **named):
        launched.append(name)
        if hasattr(tiling, "cluster"):
            named["tiling"] = tiling._replace(cluster=(1, 1) if "many" in name else 1)
        return kernel(*operands, **named, interpret=parameters)

    for module, names in KERNELS.items():
        for name in names:
            kernel = getattr(module, name)
            monkeypatch.setattr(module, name, functools.partial(replaced, name, kernel))
    published = (
        "gated_matmul squared_relu_matmul gated_norm_matmul split_matmul norm_matmul add_norm"
    )
    kinds = {*published.split(), "matmul_silu", "matmul_squared_relu"}
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why, **_: why is None and op in kinds)
    assert_same(run(lambda _: op(), None), expected, roundings=4 if terms == 2 else 12)
    return launched


def test_a_row_of_nan_stays_alone():
    x = np.array(draw(0, 4, INNER), np.float32)
    x[NAN_ROW, 3] = np.nan
    y = split_matmul(jnp.asarray(x, jnp.bfloat16), blocks(INNER, OUTER))
    nan = np.isnan(np.asarray(sum_parts(y, jnp.bfloat16), np.float32))
    np.testing.assert_array_equal(nan.all(axis=1), np.arange(4) == NAN_ROW)
    assert not nan[np.arange(4) != NAN_ROW].any()


@pytest.mark.parametrize("weight_of", ALL)
def test_a_published_head_has_the_argmax_of_its_scores(weight_of):
    x, head = draw(0, 5, INNER), weight_of(INNER, 320)
    scores = np.asarray(x, np.float64) @ np.asarray(head.dense().array, np.float64)
    best = scores.argmax(axis=1)
    none = jnp.full((5, 1), -1, jnp.int32)
    np.testing.assert_array_equal(argmax_matmul(x, head, none), best)
    scores[np.arange(5), best] = -np.inf
    forbidden = jnp.asarray(best[:, None], jnp.int32)
    np.testing.assert_array_equal(argmax_matmul(x, head, forbidden), scores.argmax(axis=1))


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rows_trace(tokens):
    for op in ops(tokens, blocks).values():
        jax.eval_shape(lambda op=op: op(lambda weight: weight))


def test_a_weight_for_other_features_is_refused():
    with pytest.raises(ValueError, match="a row for each of the 512 features, but this one is 256"):
        split_matmul(draw(0, 2, INNER), blocks(256, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("weight_of", [blocks, rows])
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 16, 40, 64, 100, 128, 256, 700, 2050])
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(tokens, weight_of, terms):
    """Tensor cores sum 128 features with about 14 bits."""
    dispatch._chosen.pop("split_matmul", None)
    weight = dataclasses.replace(weight_of(4096, 1024), terms=terms)
    x = rows_with_nan(tokens, 4096)
    y = np.asarray(jax.jit(split_matmul)(x, weight), np.float64)
    y = y.sum(axis=0) if y.ndim == 3 else y
    expected = np.asarray(jax.jit(as_multiplied)(x, weight), np.float64)
    expected = expected @ np.asarray(weight.dense().array, np.float64)
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=1e-300)
    check(y / largest, expected / largest, jnp.bfloat16, roundings=1)
    assert dispatch.implementations()["split_matmul"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_of", [int4, float4])
@pytest.mark.parametrize("tokens", [1, 8, 9, 17, 64, 128, 129, 700])
def test_on_a_gpu_a_matmul_in_4_bits_equals_the_oracle(tokens, weight_of):
    dispatch._chosen.pop("split_matmul", None)
    x, weight = rows_with_nan(tokens, 4096), weight_of(4096, 1024)
    y = np.asarray(jax.jit(split_matmul)(x, weight), np.float64)
    y = y.sum(axis=0) if y.ndim == 3 else y
    expected = np.asarray(x, np.float64) @ np.asarray(weight.dense().array, np.float64)
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=1e-300)
    check(y / largest, expected / largest, jnp.bfloat16, roundings=1)
    assert dispatch.implementations()["split_matmul"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_on_a_gpu_what_precedes_the_matmul_is_in_its_kernel(tokens):
    for op in ("gated_matmul", "gated_norm_matmul"):
        dispatch._chosen.pop(op, None)
    heads, norm = gated_heads_of(tokens, 32, 8192)
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
