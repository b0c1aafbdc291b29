"""Layers of Nemotron-3-Nano compile for an H200 to the kernels that they should have."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from sm90 import array, compile_for, operand_starts

from benchmarks.measure.model_shapes import SHAPES
from jaxspec.cache import CacheOptions, PoolSizes, Replay, allocate
from jaxspec.models import parse_config
from jaxspec.models.base import ModelInputs
from jaxspec.models.layers.mixer import LayerInputs
from jaxspec.models.nemotron_h import NemotronH
from jaxspec.pallas.gpu.device import ALIGNMENT
from jaxspec.pallas.recurrent.replay import default_window
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user
_MAMBA2 = ["add_norm", "mamba2_conv_replay", "gated_group_norm"]
_ATTENTION = ["add_norm", "attention_inputs", "paged_attention"]
_ROUTED = ["add_norm", "moe_route", "up"]
LAYERS = [  # letter of the pattern, rows, kernels, other fusions
    ("M", 1, [*_MAMBA2, "split_matmul"], 2),
    ("M", 8, [*_MAMBA2, "split_matmul"], 3),
    ("M", 64, [*_MAMBA2, "gemm", "split_gemm"], 3),
    ("*", 1, [*_ATTENTION, "split_matmul"], 2),
    ("*", 8, [*_ATTENTION, "split_matmul"], 2),
    ("*", 64, [*_ATTENTION, "gemm", "split_gemm"], 0),
    ("E", 1, [*_ROUTED, "split_matmul", "one_token_down"], 1),
    ("E", 8, [*_ROUTED, "split_matmul", "down"], 1),
    ("E", 64, [*_ROUTED, "split_gemm", "to_tiles", "down"], 8),
]


@pytest.mark.parametrize(("letter", "rows", "kernels", "fusions"), LAYERS)
def test_a_layer_is_its_kernels(h200, monkeypatch, letter, rows, kernels, fusions):
    """Some of the other fusions are a step's, not a layer's.

    These make what replay asks of the rows (M: one, and three for 64 rows) and the live tokens as
    integers (E: one, and for 64 rows a triangle of ones). For up to 8 rows the rest of M and * is
    XLA's product behind the norm. For 64 rows that of E is the list of tiles.
    """
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    shape = SHAPES["nemotron-3-nano-30b-a3b"]
    config = parse_config(shape.config())
    model = nnx.eval_shape(lambda: NemotronH(config, jnp.dtype("bfloat16")))
    graph, params = nnx.split(model.trunk.layers[shape.pattern.index(letter)])
    dtypes = map(jnp.dtype, ("bfloat16", "bfloat16", "float32"))
    specs = model.cache_specs(CacheOptions(*dtypes, Replay(default_window(4))))
    pools = jax.eval_shape(lambda: allocate(specs, PoolSizes(64, 16, 3, 1)))

    def step(params, x, delta, decode, per_token, tables, pools):
        inputs = ModelInputs(*(per_token,) * 3, per_token >= 0, tables, decode, None, 1)
        return nnx.merge(graph, params)(x, delta, LayerInputs(inputs, None), pools)

    operands = (
        params,
        array(rows, config.hidden_size, dtype=jnp.bfloat16),
        array(2, rows, config.hidden_size),
        DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5),
        array(rows, dtype=jnp.int32),
        array(3, 16, dtype=jnp.int32),
        pools,
    )
    program = compile_for(h200, monkeypatch, step, operands, donated=6).as_text()
    names = r'custom_call_target="mosaic_gpu_v2".*?op_name="jit\(step\)/jit\(_?(\w+?)(?:_kernel)?\)'
    assert sorted(re.findall(names, program)) == sorted(kernels)
    entry = program[program.index("ENTRY") :]
    # A kernel that reads a part of an array is wrapped in a fusion, and is no other.
    others = re.findall(r"^ *%(?!dynamic_slice)\S+ = .*? fusion\(", entry, re.M)
    assert len(others) == fusions
    assert not re.findall(r" (copy|copy-start|pad)\(", program)
    assert not [start for start in operand_starts(program) if start % ALIGNMENT]
