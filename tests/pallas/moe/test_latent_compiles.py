"""The layer of latent features compiles to sm_90a machine code without spills."""

import re

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for, operand_starts

from benchmarks.measure.mixtures import mixture
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.pallas.gpu.device import ALIGNMENT
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.experts import Experts
from jaxspec.pallas.moe.feed_forward import Router
from jaxspec.pallas.moe.latent import Columns, latent_moe_feed_forward
from jaxspec.pallas.moe.route import Routing
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense, DenseExperts

OPTIMIZED = True  # as for a user

FEW, MANY = ["down"], ["to_tiles", "tiled", "from_tiles"]


@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [
        (1, ["one_token_down"]),
        (2, FEW),
        (8, FEW),
        (16, ["to_tiles", "down", "split_gemm"]),
        (64, ["to_tiles", "down", "split_gemm"]),
        (256, [*MANY, "split_gemm"]),
        (2048, MANY),
    ],
)
def test_the_layer_is_its_kernels(h200, monkeypatch, capfd, tokens, kernels):
    """Nemotron-3 Super's; no weight is copied."""
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    features, sizes = mixture("nemotron-3-super-120b-a12b")
    compiled = compiled_for(h200, monkeypatch, features, sizes, tokens)
    names = r'custom_call_target="mosaic_gpu_v2".*?op_name="[^"]*/jit\((\w+?)_kernel\)'
    found = re.findall(names, compiled.as_text())
    assert sorted(found) == sorted(["add_norm", "moe_route", "up", *kernels])
    assert_lean(compiled, capfd.readouterr().out, between=2**31)


@pytest.mark.parametrize("experts", [40, 64, 128])
def test_the_features_of_one_token_begin_where_a_kernel_reads_them(h200, monkeypatch, experts):
    """XLA hands them on without a copy, whatever number of scores lies before them."""
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    activation, latent = Activation.SQUARED_RELU, 256
    routing = Routing(experts, 6, "sigmoid")
    sizes = MoEConfig(routing, 128, 384, activation=activation, latent_size=latent)
    starts = operand_starts(compiled_for(h200, monkeypatch, 1024, sizes, 1).as_text())
    assert 2 * 128 in starts and not [start for start in starts if start % ALIGNMENT]


def compiled_for(h200, monkeypatch, features, sizes, tokens):
    rule, width, latent = sizes.rule, sizes.intermediate_size, sizes.latent_size

    def step(stream, pending, scale, router, up, down, output, live, correction):
        router = Router(Dense(router), correction, rule)
        experts = Experts(DenseExperts(up), DenseExperts(down), sizes.activation)
        operands = Norm(scale, 1e-6), router, experts, Dense(output), live
        return latent_moe_feed_forward(stream, pending, *operands)

    columns = Columns.of(rule.num_experts, latent, sizes.shared_size).shared.stop
    columns = -(-columns // BLOCK_N) * BLOCK_N
    dims = (
        *((tokens, features), (tokens, features), (features,), (features, columns)),
        *((rule.none, width, latent), (rule.none, latent, width)),
        (latent + sizes.shared_size, features),
    )
    operands = [array(*each, dtype=jnp.bfloat16) for each in dims]
    operands += [array(tokens, dtype=jnp.bool_), array(rule.num_experts)]
    return compile_for(h200, monkeypatch, step, operands)
