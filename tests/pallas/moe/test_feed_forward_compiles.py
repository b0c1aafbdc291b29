"""The layer compiles to sm_90a machine code without spills, at the sizes of published models."""

import re

import jax.numpy as jnp
import pytest
from pairwise import soak
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.mixtures import mixture
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.experts import MAX_DIRECT, Experts, moe_experts, tile_rows
from jaxspec.pallas.moe.feed_forward import Router, moe_feed_forward
from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.moe.work_list import max_tiles
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense, DenseExperts, InputsFirstExperts

OPTIMIZED = True  # as for a user

ONE, FEW = ["moe_route", "up", "one_token_down"], ["moe_route", "up", "down"]
MORE = ["moe_route", "to_tiles", "up", "down"]
MANY = ["moe_route", "to_tiles", "up", "tiled", "from_tiles"]


def places(rule, tokens):
    """Rows of all tiles that the list may need; of one tile for each choice of few tokens."""
    choices = tokens * rule.parts
    if tokens <= MAX_DIRECT:
        return MAX_DIRECT * choices
    rows = tile_rows(tokens, rule.parts, rule.none)
    return rows * max_tiles(choices, rule.none + 1, rows)


def scores(features, tokens):
    """The kernel of `moe_scores`, if it has one."""
    if tokens <= MAX_DIRECT:
        return ["split_matmul"]
    return ["split_gemm"] if features % 256 and tokens <= 128 else []


@pytest.mark.parametrize(
    ("model", "tokens", "kernels"),
    [
        ("qwen3.5-35b-a3b", 1, ONE),
        ("qwen3.5-35b-a3b", 2, FEW),
        ("qwen3.5-35b-a3b", 8, FEW),
        ("qwen3.5-35b-a3b", 64, MORE),
        ("qwen3.5-35b-a3b", 256, MORE),
        ("qwen3.5-35b-a3b", 512, MANY),
        ("qwen3.5-35b-a3b", 2048, MANY),
        ("qwen3.5-35b-a3b", 4096, MANY),
        ("qwen3-next-80b", 1, ONE),
        ("qwen3-next-80b", 8, FEW),
        ("qwen3-30b-a3b", 1, ONE),
        *(("nemotron-3-nano-30b-a3b", tokens, FEW) for tokens in (2, 8)),
        *(("nemotron-3-nano-30b-a3b", tokens, MORE) for tokens in (16, 64)),
        *(("nemotron-3-nano-30b-a3b", tokens, MANY) for tokens in (256, 512, 2048, 4096)),
        ("nemotron-3-nano-30b-a3b", 1, ONE),
        ("granite-4-small", 1, ONE),
        ("granite-4-small", 8, FEW),
        ("granite-4-small", 16, MORE),
        ("granite-4-small", 64, MANY),
        ("granite-4-small", 2048, MANY),
        soak("gemma-4-26b-a4b", 8, FEW),
        soak("gemma-4-26b-a4b", 64, MORE),
        soak("gemma-4-26b-a4b", 2048, MANY),
    ],
)
def test_the_layer_is_its_kernels(h200, monkeypatch, capfd, model, tokens, kernels):
    """No weight is copied: they hand on the tokens in tiles, and what is between up and down."""
    assert_kernels(h200, monkeypatch, capfd, model, tokens, kernels)


@pytest.mark.parametrize(("tokens", "kernels"), [(1, FEW), (8, FEW), (64, MORE), (2048, MANY)])
def test_half_of_the_experts_are_the_same_kernels(h200, monkeypatch, capfd, tokens, kernels):
    """On the second of two devices; a single token has no kernel of its own."""
    monkeypatch.setattr("jaxspec.parallel.size", lambda: 2)
    monkeypatch.setattr("jaxspec.parallel.first_of", lambda count: count)
    assert_kernels(h200, monkeypatch, capfd, "qwen3.5-35b-a3b", tokens, kernels, devices=2)


@pytest.mark.parametrize(
    ("tokens", "features"), [*((n, 2880) for n in (1, 8, 64, 256, 512, 2048)), (8, 256)]
)
def test_experts_with_biases_are_kernels(h200, monkeypatch, capfd, tokens, features):
    """Of gpt-oss-20b, and small ones. Between the kernels are tokens in tiles, and both products.

    256 features are copied 128 at a time.
    """
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    held, parts = 32, 4

    def step(x, up, down, up_bias, down_bias, experts, weights):
        stacks = InputsFirstExperts(up), InputsFirstExperts(down)
        layers = Experts(*stacks, Activation.CLAMPED_SWIGLU, up_bias, down_bias)
        return moe_experts(x, layers, Choices(experts, weights))

    stacks = (held, features, 2 * features), (held, features, features)
    biases = (held, 2 * features), (held, features)
    operands = [array(*dims, dtype=jnp.bfloat16) for dims in ((tokens, features), *stacks, *biases)]
    operands += [array(tokens, parts, dtype=jnp.int32), array(tokens, parts)]
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert kernels_of(compiled) == ["tiled", "tiled", "to_tiles"]
    rows = tile_rows(tokens, parts, held)
    between = 2 * rows * max_tiles(tokens * parts, held + 1, rows) * 5 * features
    assert_lean(compiled, capfd.readouterr().out, between=between + 2**20)


def kernels_of(compiled):
    """The names of its kernels, sorted."""
    names = r'custom_call_target="mosaic_gpu_v2".*?op_name="[^"]*/jit\((\w+?)_kernel\)'
    return sorted(re.findall(names, compiled.as_text()))


def assert_kernels(h200, monkeypatch, capfd, model, tokens, kernels, devices=1):
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    features, sizes = mixture(model)
    rule, width, activation = sizes.rule, sizes.intermediate_size, sizes.activation
    held = rule.none - rule.num_experts + rule.num_experts // devices

    def step(stream, pending, scale, router, up, down, live, correction):
        router = Router(Dense(router), correction if sizes.has_correction else None, rule)
        experts = Experts(DenseExperts(up), DenseExperts(down), activation)
        return moe_feed_forward(stream, pending, Norm(scale, 1e-6), router, experts, live)

    columns = -(-rule.num_columns // BLOCK_N) * BLOCK_N
    layer = (tokens, features), (tokens, features), (features,), (features, columns)
    experts = (held, activation.pieces * width, features), (held, features, width)
    operands = [array(*dims, dtype=jnp.bfloat16) for dims in (*layer, *experts)]
    operands += [array(tokens, dtype=jnp.bool_), array(rule.num_experts)]
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert kernels_of(compiled) == sorted(["add_norm", *scores(features, tokens), *kernels])
    tiled = features if "to_tiles" in kernels else 0
    between = 2 * places(rule, tokens) * (tiled + width)
    assert_lean(compiled, capfd.readouterr().out, between=between + 2**20)
