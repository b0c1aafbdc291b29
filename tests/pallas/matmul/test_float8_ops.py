"""All ops of published weights in 8 bits are those of the same numbers in 16 bits.

Then the ops with their kernels in the interpreter: which of them runs where, and the same results.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import NAN_ROW
from published_8bit import blocks_of, rows_of

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import float8_kernel
from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul
from jaxspec.pallas.matmul.feed_forward import (
    feed_forward,
    matmul_silu,
    matmul_squared_relu,
    squared_relu_feed_forward,
)
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.split_matmul import (
    gated_matmul,
    gated_norm_matmul,
    split_matmul,
    squared_relu_matmul,
)
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense, Float8Blocks, Float8Rows

INNER, OUTER = 512, 128
KERNELS = (
    "matmul_kernel",
    "split_matmul_kernel",
    "activated_matmul_kernel",
    "gated_norm_matmul_kernel",
)


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


@pytest.mark.parametrize("weight_of", [blocks, rows])
def test_16_bits_hold_these_weights(weight_of):
    weight = weight_of(INNER, OUTER)
    rounded = in_16_bits(weight).array.astype(jnp.float32)
    np.testing.assert_array_equal(rounded, weight.dense().array)


@pytest.mark.parametrize("weight_of", [blocks, rows])
@pytest.mark.parametrize("tokens", [1, 8, 20])
@pytest.mark.parametrize("op", ops(1, blocks))
def test_an_op_is_that_of_the_weight_in_16_bits(op, tokens, weight_of):
    run_op = ops(tokens, weight_of)[op]
    assert_same(run(run_op, lambda weight: weight), run(run_op, in_16_bits))


@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("op", ops(1, blocks))
def test_an_op_with_its_kernel_is_the_op_without(monkeypatch, interpreter, op, tokens):
    run_op = ops(tokens, blocks)[op]
    expected = run(run_op, lambda weight: weight)
    launched = interpreted(monkeypatch, interpreter)
    assert_same(run(run_op, lambda weight: weight), expected)
    assert launched
    is_fused = {"activated_matmul_kernel", "gated_norm_matmul_kernel"} & set(launched)
    assert not is_fused if tokens > 8 else (op.startswith(("norm", "split", "matmul")) or is_fused)


def interpreted(monkeypatch, parameters):
    """Run the kernels of published weights in the interpreter; return the names of those run."""
    launched = []

    def replaced(name, kernel, *operands):
        launched.append(name)
        return kernel(*operands, interpret=parameters)

    for name in KERNELS:
        kernel = getattr(float8_kernel, name)
        monkeypatch.setattr(float8_kernel, name, functools.partial(replaced, name, kernel))
    published = "gated_matmul squared_relu_matmul gated_norm_matmul split_matmul norm_matmul"
    kinds = {*published.split(), "matmul_silu", "matmul_squared_relu"}
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why, **_: why is None and op in kinds)
    return launched


def test_a_row_of_nan_stays_alone():
    x = np.array(draw(0, 4, INNER), np.float32)
    x[NAN_ROW, 3] = np.nan
    y = split_matmul(jnp.asarray(x, jnp.bfloat16), blocks(INNER, OUTER))
    nan = np.isnan(np.asarray(sum_parts(y, jnp.bfloat16), np.float32))
    np.testing.assert_array_equal(nan.all(axis=1), np.arange(4) == NAN_ROW)
    assert not nan[np.arange(4) != NAN_ROW].any()


@pytest.mark.parametrize("weight_of", [blocks, rows])
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
