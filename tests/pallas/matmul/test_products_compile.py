"""The products compile to sm_90a machine code: without spills, and without copies or slices."""

import itertools
import re

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul
from jaxspec.pallas.matmul.feed_forward import matmul_silu, matmul_squared_relu
from jaxspec.pallas.matmul.gemm import MAX_PARTS, choose
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.split_matmul import (
    gated_matmul,
    gated_norm_matmul,
    split_matmul,
    squared_relu_matmul,
)
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.requests.request import ROW_STOP_IDS
from jaxspec.weight import Dense, Float8

OPTIMIZED = True  # as for a user
EPS = 1e-6
SMALL = "qwen3.5-0.8b", "qwen3.5-2b"  # models whose products of up to 8 rows are kernels
PROJECTED = GDN[SMALL[0]].projected


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Ops run their kernels where these take the operands, though there is no GPU."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)


@pytest.mark.parametrize(
    ("tokens", "pending"), [(1, "parts"), (2, "parts"), (8, "tokens"), (2, "nothing")]
)
@pytest.mark.parametrize(
    ("model", "columns"),
    [*itertools.product(SMALL, ["in_proj", "qkv"]), (SMALL[0], "gate_up")],
)
def test_norm_matmul(h200, monkeypatch, capfd, model, columns, pending, tokens):
    features = HIDDEN[model]

    def step(stream, added, scale, weight):
        norm = Norm(scale, EPS, zero_centred=True)
        total, y = norm_matmul(stream, added, norm, Dense(weight))
        return y if added is None else (total, y)  # a stream that is put out as it came is copied

    stream = array(tokens, features, dtype=jnp.bfloat16)
    outer = {"in_proj": PROJECTED, "qkv": 5120, "gate_up": 2 * INTERMEDIATE[model]}[columns]
    weight = array(features, outer, dtype=jnp.bfloat16)
    parts = array(8192 // features, tokens, features)  # as many as `split_matmul` makes
    added = {"parts": parts, "tokens": stream, "nothing": None}[pending]
    operands = stream, added, array(features, dtype=jnp.bfloat16), weight
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("model", SMALL)
def test_split_matmul(h200, monkeypatch, capfd, model, tokens):
    """The last product of the feed-forward layer, of attention, and of Gated DeltaNet."""
    shape, outer = GDN[SMALL[0]], HIDDEN[model]

    def step(gate_up, down, attended, out, up, heads, gates, scale):
        norm = GatedNorm(gates, scale, first=shape.conv_dim, eps=EPS)
        mixed = gated_norm_matmul(heads, norm, Dense(out))
        both = gated_matmul(gate_up, Dense(down)), squared_relu_matmul(up, Dense(down))
        return *both, split_matmul(attended, Dense(out)), mixed

    sizes = (tokens, 2 * INTERMEDIATE[model]), (INTERMEDIATE[model], outer), (tokens, 2048)
    sizes += (2048, outer), (tokens, INTERMEDIATE[model])
    products = [array(*dims, dtype=jnp.bfloat16) for dims in sizes]
    heads, scale = array(tokens, shape.value_heads, shape.value_dim), array(shape.value_dim)
    operands = *products, heads, array(tokens, PROJECTED, dtype=jnp.bfloat16), scale
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)
    # The gates are not cut out of the projection.
    assert not re.findall(r"(slice|fusion)\(", compiled.as_text())


@pytest.mark.parametrize(
    ("model", "tokens"), [*((model, 64) for model in HIDDEN), (SMALL[0], 16), (SMALL[0], 256)]
)
def test_gemm(h200, monkeypatch, capfd, model, tokens):
    """The product after a norm, the gated one, and the one in parts."""
    features, inner = HIDDEN[model], INTERMEDIATE[model]

    def step(stream, scale, qkv, gate_up, down):
        _, projected = norm_matmul(stream, stream, Norm(scale, EPS), Dense(qkv))
        return projected, split_matmul(matmul_silu(stream, Dense(gate_up)), Dense(down))

    sizes = (tokens, features), (features,), (features, 5120), (features, 2 * inner)
    operands = [array(*dims, dtype=jnp.bfloat16) for dims in (*sizes, (inner, features))]
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out, between=3 * tokens * max(features, inner))


@pytest.mark.parametrize(
    ("model", "product", "columns", "tokens"),
    [
        *(("qwen3.5-9b", "gemm", GDN["qwen3.5-9b"].projected, tokens) for tokens in (72, 128, 256)),
        *(("qwen3.5-9b", "split_gemm", 4096, tokens) for tokens in (72, 128, 256)),
        *(("qwen3.5-9b", "matmul_silu", 24576, tokens) for tokens in (72, 128, 136, 200, 256)),
        ("qwen3.5-27b", "gemm", 14336, 128),
        ("qwen3.5-27b", "gemm", GDN["qwen3.5-27b"].projected, 256),
        ("qwen3.5-27b", "split_gemm", 5120, 256),
    ],
)
def test_one_wave_gemm(h200, monkeypatch, capfd, model, product, columns, tokens):
    from jaxspec.pallas.matmul import gemm_kernel

    is_split, gate_up = product == "split_gemm", product == "matmul_silu"
    inner = INTERMEDIATE[model] if is_split else HIDDEN[model]
    x, weight = (array(*dims, dtype=jnp.bfloat16) for dims in ((tokens, inner), (inner, columns)))
    options = {"gate_up": gate_up, "max_parts": MAX_PARTS if is_split else 1}
    why, wave = choose(x, Dense(weight), HIDDEN[model], **options)
    assert why is None and wave is not None
    kernel = getattr(gemm_kernel, f"{product}_kernel")

    def step(x, weight):
        return kernel(x, weight, wave)

    compiled = compile_for(h200, monkeypatch, step, (x, weight))
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("tokens", [16, 64, 128, 256])
@pytest.mark.parametrize(("features", "inner"), [(3136, 12544), (4480, 15680)])
def test_matmul_squared_relu(h200, monkeypatch, capfd, features, inner, tokens):
    """Of Nemotron-3-Nano-4B and of Nemotron-Nano-9B-v2."""
    x, weight = (
        array(*dims, dtype=jnp.bfloat16) for dims in ((tokens, features), (features, inner))
    )

    def step(x, weight):
        return matmul_squared_relu(x, Dense(weight))

    compiled = compile_for(h200, monkeypatch, step, (x, weight))
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("tokens", [1, 8])
def test_split_matmul_of_2688_features(h200, monkeypatch, capfd, tokens):
    """What ends Nemotron-3-Nano's layers of attention and of Mamba2."""
    dims = (tokens, 4096), (4096, 2688)
    operands = [array(*each, dtype=jnp.bfloat16) for each in dims]

    def step(heads, out):
        return split_matmul(heads, Dense(out))

    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)
    assert not re.findall(r"(slice|fusion)\(", compiled.as_text())


@pytest.mark.parametrize("tokens", [16, 64])
def test_the_products_of_2688_features(h200, monkeypatch, capfd, tokens):
    """Nemotron-3-Nano's projections of attention, and the one that ends a layer."""
    features, attended = 2688, 32 * 128

    def step(stream, scale, qkv, heads, out):
        stream, projected = norm_matmul(stream, stream, Norm(scale, EPS), Dense(qkv))
        return stream, projected, split_matmul(heads, Dense(out))

    dims = (tokens, features), (features,), (features, 36 * 128), (tokens, attended)
    operands = [array(*each, dtype=jnp.bfloat16) for each in (*dims, (attended, features))]
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out, between=3 * tokens * features)


@pytest.mark.parametrize("num_forbidden", [0, ROW_STOP_IDS])
@pytest.mark.parametrize(
    ("features", "tokens", "ids"),
    [
        *((1024, tokens, 248320) for tokens in (8, 12, 36, 64, 128, 136, 200, 256, 260)),
        *((4096, tokens, 248320) for tokens in (64, 256)),
        (4096, 64, 16384),
    ],
)
def test_argmax_matmul(h200, monkeypatch, capfd, features, tokens, ids, num_forbidden):
    """The scores are not written to memory."""
    x, weight = (array(*dims, dtype=jnp.bfloat16) for dims in ((tokens, features), (features, ids)))
    operands = x, Dense(weight), array(tokens, num_forbidden, dtype=jnp.int32)
    compiled = compile_for(h200, monkeypatch, argmax_matmul, operands)
    assert_lean(compiled, capfd.readouterr().out, between=tokens * ids / 8)


@pytest.mark.parametrize(
    ("features", "tokens", "ids"),
    [
        *((4096, tokens, 248320) for tokens in (1, 8, 64, 128, 136, 256)),
        (1024, 64, 248320),
        (5120, 64, 248320),
        (4096, 8, 16376),
    ],
)
def test_argmax_matmul_in_8_bits(h200, monkeypatch, capfd, features, tokens, ids):
    """Neither the scores nor the weight in another dtype are written to memory."""
    x = array(tokens, features, dtype=jnp.bfloat16)
    weight = Float8(array(ids, features, dtype=jnp.float8_e4m3fn), array())
    operands = x, weight, array(tokens, 0, dtype=jnp.int32)
    compiled = compile_for(h200, monkeypatch, argmax_matmul, operands)
    assert_lean(compiled, capfd.readouterr().out, between=max(2**20, tokens * ids / 8))


def test_a_weight_becomes_8_bits_without_a_copy_in_others(h200, monkeypatch):
    weight = Dense(array(4096, 248320, dtype=jnp.bfloat16))
    compiled = compile_for(h200, monkeypatch, Float8.of, (weight,))
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
