"""The matmuls of published weights in 8 bits compile to sm_90a machine code, without spills."""

import jax.numpy as jnp
import pytest
from published_8bit import matmuls_of_layer as sizes
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.feed_forward import feed_forward
from jaxspec.pallas.matmul.float8_many_rows import Float8ManyRowsTiling
from jaxspec.pallas.matmul.float8_terms import CHUNK, Terms
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.matmul.split_matmul import (
    gated_matmul,
    gated_norm_matmul,
    split_matmul,
    squared_relu_matmul,
)
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Columns, Dense, Float8Blocks, Float8Rows

OPTIMIZED = True  # as for a user
EPS = 1e-6
F8 = jnp.float8_e4m3fn


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Ops run their kernels where these take the operands, though there is no GPU."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)


def blocks(inner, outer, terms):
    return Float8Blocks(array(outer, inner, dtype=F8), array(outer // 64, inner // 128), terms)


@pytest.mark.few(9)
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [1, 8, 12, 16, 64, 65, 128, 256, 2048])
@pytest.mark.parametrize("model", ["qwen3.5-9b", "qwen3.5-27b"])
def test_a_layer(h200, monkeypatch, capfd, model, tokens, terms):
    """Gated DeltaNet's two matmuls and the feed-forward layer's; nothing dequantises a weight.

    As published, the columns of gates and decays have 16 bits; `Linear` pads them.
    """
    hidden, inner, shape = HIDDEN[model], INTERMEDIATE[model], GDN[model]
    values = shape.value_heads * shape.value_dim
    columns = shape.conv_dim + values

    def step(stream, scale, heads, head_scale, in_proj, out, gate_up, down):
        norm = Norm(scale, EPS, zero_centred=True)
        stream, projected = norm_matmul(stream, stream, norm, in_proj)
        gated = GatedNorm(projected, head_scale, first=shape.conv_dim, eps=EPS)
        return feed_forward(stream, gated_norm_matmul(heads, gated, out), norm, gate_up, down)

    sizes = (hidden, columns), (values, hidden), (hidden, 2 * inner), (inner, hidden)
    in_proj, *weights = [blocks(*size, terms) for size in sizes]
    padded = -(-2 * shape.value_heads // BLOCK_N) * BLOCK_N
    in_16_bits = Dense(array(hidden, padded, dtype=jnp.bfloat16))
    rows = array(tokens, hidden, dtype=jnp.bfloat16), array(hidden, dtype=jnp.bfloat16)
    heads = array(tokens, shape.value_heads, shape.value_dim), array(shape.value_dim)
    operands = *rows, *heads, Columns((in_proj, in_16_bits)), *weights
    compiled = compile_for(h200, monkeypatch, step, operands)
    # The kernel of many rows pads a single one.
    between = 4 * max(tokens, 2) * (columns + 3 * inner + 8 * hidden)
    assert_lean(compiled, capfd.readouterr().out, between=between)


# Inner, outer and whether parts are allowed, of Qwen3.5-35B-A3B's attention and Gated DeltaNet
MIXERS_OF_35B = (2048, 9216, False), (4096, 2048, True), (2048, 12288, False)


@pytest.mark.few(10)
@pytest.mark.parametrize("weight_type", [Float8Blocks, Float8Rows])
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [128, 200, 8192])
@pytest.mark.parametrize(
    ("inner", "outer", "is_split"), [*sizes("qwen3.5-9b"), *sizes("qwen3.5-27b"), *MIXERS_OF_35B]
)
def test_the_kernel_of_many_rows(
    h200, monkeypatch, capfd, inner, outer, is_split, tokens, terms, weight_type
):
    """A product runs while the one before is scaled: ptxas must not let them run one by one."""
    from jaxspec.pallas.matmul.float8_many_rows_kernel import many_rows_kernel

    tiling = Float8ManyRowsTiling.of(tokens, inner, outer, terms, is_split=is_split)
    numbers = tuple(array(tokens, inner, dtype=F8) for _ in range(terms))
    weight = blocks(inner, outer, terms)
    if weight_type is Float8Rows:
        weight = Float8Rows(weight.array, array(outer), terms)

    def step(terms, weight):
        named = {"tokens": tokens, "dtype": jnp.dtype(jnp.bfloat16), "tiling": tiling}
        return many_rows_kernel(terms, weight, **named)

    operands = Terms(numbers, array(inner // CHUNK, tokens)), weight
    compiled, report = compile_for(h200, monkeypatch, step, operands), capfd.readouterr().out
    assert_lean(compiled, report)
    assert "serialized" not in report


@pytest.mark.few(4)
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [9, 33, 100, 2050])
def test_rows_that_fill_no_block(h200, monkeypatch, capfd, tokens, terms):
    operands = array(tokens, 4096, dtype=jnp.bfloat16), blocks(4096, 5120, terms)
    compiled = compile_for(h200, monkeypatch, split_matmul, operands)
    assert_lean(compiled, capfd.readouterr().out, between=40 * (tokens + 8) * 5120)


@pytest.mark.parametrize("tokens", [1, 8, 12])
@pytest.mark.parametrize("inner", [4352, 2176])
def test_a_part_of_a_matrix(h200, monkeypatch, capfd, inner, tokens):
    """On one of 4 or 8 devices Qwen3.5-27B's down matrix has no multiple of 512 features."""
    operands = array(tokens, 2 * inner, dtype=jnp.bfloat16), blocks(inner, 5120, 2)
    compiled = compile_for(h200, monkeypatch, gated_matmul, operands)
    assert_lean(compiled, capfd.readouterr().out, between=4 * 16 * 5 * 5120)


@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [8, 64])
def test_a_scale_per_column(h200, monkeypatch, capfd, tokens, terms):
    """Of Nemotron-3-Nano: features that no 4 blocks divide, and the square before a matmul."""
    inner, outer = 2688, 4096

    def step(x, up, y, down):
        return split_matmul(x, up), squared_relu_matmul(y, down)

    def weight(inner, outer):
        return Float8Rows(array(outer, inner, dtype=F8), array(outer), terms)

    rows = [array(tokens, features, dtype=jnp.bfloat16) for features in (inner, outer)]
    operands = rows[0], weight(inner, outer), rows[1], weight(outer, inner)
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out, between=16 * tokens * (inner + outer))
