"""The matmuls of published weights in 4 bits compile to sm_90a machine code, without spills."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas.matmul.four_bits_kernel import four_bits_kernel
from jaxspec.weight import Float4Groups, Int4Groups

OPTIMIZED = True  # as for a user


def weight_of(kind, inner, outer):
    numbers = array(outer, inner // 2, dtype=jnp.uint8)
    if kind == "nvfp4":
        scale = array(inner // 16, outer, dtype=jnp.float8_e4m3fn)
        return Float4Groups(numbers, scale, array(outer))
    group, has_zeros = kind
    zero = array(inner // group, outer, dtype=jnp.uint8) if has_zeros else None
    return Int4Groups(numbers, array(inner // group, outer), zero)


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
    weights = weight_of(kind, hidden, columns), weight_of(kind, inner, hidden)
    compiled = compile_for(h200, monkeypatch, step, (*rows, *weights))
    between = 4 * tokens * (columns + 8 * hidden)
    assert_lean(compiled, capfd.readouterr().out, between=between)
