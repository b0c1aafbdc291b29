"""The layer of experts in FP8 compiles to sm_90a without spills, at the sizes of published models.

No weight is dequantised or copied.
"""

import re

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.mixtures import mixture
from jaxspec.pallas import dispatch
from jaxspec.pallas.moe import experts
from jaxspec.pallas.moe.experts import MAX_DIRECT, Experts, moe_experts, tile_rows
from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.moe.work_list import max_tiles
from jaxspec.weight import Float8BlockExperts, Float8RowExperts

OPTIMIZED = True  # as for a user
F8 = jnp.float8_e4m3fn

ONE, FEW = ["up", "one_token_down"], ["up", "down"]
MORE, MANY = ["to_tiles", "up", "down"], ["to_tiles", "up", "tiled", "from_tiles"]
SPLITS = ["split", "split"]  # of larger tiles, or where activations are rounded


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch):
    """Ops run their kernels where these take the operands, though there is no GPU."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)


def blocks(number, outer, inner, terms):
    scale = array(number, outer // 64, inner // 128)
    return Float8BlockExperts(array(number, outer, inner, dtype=F8), scale, terms)


def rows(number, outer, inner, terms):
    return Float8RowExperts(array(number, outer, inner, dtype=F8), array(number, outer), terms)


def compile_layer(h200, monkeypatch, model, kind, tokens, terms):
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    features, sizes = mixture(model)
    rule, width, activation = sizes.rule, sizes.intermediate_size, sizes.activation
    up = kind(rule.none, activation.pieces * width, features, terms)
    down = kind(rule.none, features, width + -width % 128, terms)
    chosen = Choices(array(tokens, rule.parts, dtype=jnp.int32), array(tokens, rule.parts))
    operands = array(tokens, features, dtype=jnp.bfloat16), Experts(up, down, activation), chosen
    # A new function each time: JAX would reuse the trace of one, which may have had other bounds.
    return compile_for(h200, monkeypatch, lambda *args: moe_experts(*args), operands)


def kernels_of(compiled):
    names = r'custom_call_target="mosaic_gpu_v2".*?op_name="[^"]*/jit\((\w+?)_kernel\)'
    return sorted(re.findall(names, compiled.as_text()))


@pytest.mark.parametrize(("terms", "kernels"), [(2, FEW), (1, SPLITS + ONE)])
def test_tokens_that_are_split_before_the_kernel_take_no_room(h200, monkeypatch, terms, kernels):
    monkeypatch.setattr(experts, "_MOST_HELD", 0)
    compiled = compile_layer(h200, monkeypatch, "qwen3.5-35b-a3b", blocks, 1, terms)
    assert kernels_of(compiled) == sorted(kernels)


@pytest.mark.parametrize(
    ("model", "kind", "tokens", "kernels", "terms"),
    [
        ("qwen3.5-35b-a3b", blocks, 1, ONE, 2),
        ("qwen3.5-35b-a3b", blocks, 2, FEW, 2),
        ("qwen3.5-35b-a3b", blocks, 8, FEW, 2),
        ("qwen3.5-35b-a3b", blocks, 64, MORE, 2),
        ("qwen3.5-35b-a3b", blocks, 256, SPLITS + MORE, 2),
        ("qwen3.5-35b-a3b", blocks, 512, SPLITS + MANY, 2),
        ("qwen3.5-35b-a3b", blocks, 513, SPLITS + MANY, 2),
        ("qwen3.5-35b-a3b", blocks, 4096, SPLITS + MANY, 2),
        ("qwen3-next-80b", blocks, 1, ONE, 2),
        ("qwen3-30b-a3b", blocks, 1, ONE, 2),
        ("qwen3-30b-a3b", blocks, 64, SPLITS + MORE, 2),
        ("nemotron-3-nano-30b-a3b", rows, 1, ONE, 2),
        ("nemotron-3-nano-30b-a3b", rows, 8, FEW, 2),
        ("nemotron-3-nano-30b-a3b", rows, 64, SPLITS + MORE, 2),
        ("nemotron-3-nano-30b-a3b", rows, 2048, SPLITS + MANY, 2),
        ("granite-4-small", rows, 1, ONE, 2),
        ("granite-4-small", rows, 8, FEW, 2),
        ("granite-4-small", rows, 2048, SPLITS + MANY, 2),
        ("qwen3.5-35b-a3b", blocks, 1, SPLITS + ONE, 1),
        ("qwen3.5-35b-a3b", blocks, 8, SPLITS + FEW, 1),
        ("qwen3.5-35b-a3b", blocks, 65, SPLITS + MORE, 1),
        ("qwen3.5-35b-a3b", blocks, 4096, SPLITS + MANY, 1),
        ("nemotron-3-nano-30b-a3b", rows, 64, MORE, 1),
    ],
)
def test_the_op_is_its_kernels(h200, monkeypatch, capfd, model, kind, tokens, kernels, terms):
    features, sizes = mixture(model)
    rule, width = sizes.rule, sizes.intermediate_size
    compiled = compile_layer(h200, monkeypatch, model, kind, tokens, terms)
    assert kernels_of(compiled) == sorted(kernels)
    choices = tokens * rule.parts
    places = MAX_DIRECT * choices
    if tokens > MAX_DIRECT:
        of_tile = min(tile_rows(tokens, rule.parts, rule.none), 64)
        places = of_tile * max_tiles(choices, rule.none + 1, of_tile)
    # Two numbers of 8 bits per activation, and 16 bits between up and down, and after down.
    between = places * (3 * features + 5 * width)
    assert_lean(compiled, capfd.readouterr().out, between=between + 2**20)
