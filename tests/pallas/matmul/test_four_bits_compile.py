"""The matmuls of published weights in 4 bits compile to sm_90a machine code, without spills."""

import functools

import jax.numpy as jnp
import pytest
from published_4bit import abstract_4_bits
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas.matmul.four_bits_kernel import four_bits_kernel

OPTIMIZED = True  # as for a user


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", ["nvfp4", (128, False), (128, True), (64, True), (32, True)])
@pytest.mark.parametrize("tokens", [1, 12, 16, 24, 65, 128, 2048])
@pytest.mark.parametrize("model", ["qwen3.5-9b", "qwen3.5-27b"])
def test_matmuls_of_a_layer(h200, monkeypatch, capfd, model, tokens, kind):
    hidden, inner, shape = HIDDEN[model], INTERMEDIATE[model], GDN[model]
    values = shape.value_heads * shape.value_dim

    def step(x, gated, in_proj, out):
        return four_bits_kernel(x, in_proj), four_bits_kernel(gated, out, is_split=True)

    rows = [array(tokens, size, dtype=jnp.bfloat16) for size in (hidden, inner)]
    columns = shape.conv_dim + values
    weights = abstract_4_bits(kind, hidden, columns), abstract_4_bits(kind, inner, hidden)
    compiled = compile_for(h200, monkeypatch, step, (*rows, *weights))
    between = 4 * tokens * (columns + 8 * hidden)
    assert_lean(compiled, capfd.readouterr().out, between=between)


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "kind", "is_split"),
    [
        (8, 2688, 4608, "nvfp4", False),  # Nemotron-3-Nano has 21 times 128 features
        (48, 2688, 4608, "nvfp4", False),
        (8, 2688, 10368, (128, True), False),
        (8, 2176, 5120, (128, False), True),  # an eighth of the features of a 27B
        (65, 2176, 5120, "nvfp4", True),
        (128, 4096, 4160, (128, True), False),  # one warpgroup multiplies
        (128, 4096, 4160, "nvfp4", True),
    ],
)
def test_features_or_columns_in_odd_numbers(
    h200, monkeypatch, capfd, tokens, inner, outer, kind, is_split
):
    operands = array(tokens, inner, dtype=jnp.bfloat16), abstract_4_bits(kind, inner, outer)
    step = functools.partial(four_bits_kernel, is_split=is_split)
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out, between=4 * tokens * 4 * outer)
