"""A decoder layer compiles for an H200 to the kernels that it should have, and no copies.

No GPU is needed, only two wheels (142 MB) of jax's version, 0.11 or later: `pip install --no-deps
jax-cuda13-pjrt jax-cuda13-plugin`.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from sm90 import array, compile_for

from benchmarks.measure.model_shapes import SHAPES
from jaxspec.cache import CacheOptions, PoolSizes, Replay, allocate
from jaxspec.models import parse_config
from jaxspec.models.base import ModelInputs
from jaxspec.models.layers.mixer import LayerInputs
from jaxspec.models.qwen3_5 import Qwen3_5
from jaxspec.pallas.recurrent.replay import default_window
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user


_FEW = ["norm_matmul"], ["add_norm", "matmul"]  # of one row, and of up to 8
_MORE = ["add_norm", "gemm"], ["split_gemm", "add_norm", "matmul_silu"]  # of 16 to 256
_GATED_DELTA_NET = ["gdn_conv_replay"]
_ATTENTION = ["attention_inputs", "paged_attention"]
LAYERS = [  # kind, rows, width, kernels, other fusions
    ("GatedDeltaNet", 1, 1, [*_FEW[0], *_GATED_DELTA_NET, "gated_norm_matmul", *_FEW[0]], 1),
    ("GatedDeltaNet", 1, 4, [*_FEW[1], *_GATED_DELTA_NET, "gated_norm_matmul", *_FEW[1]], 1),
    ("GatedDeltaNet", 8, 1, [*_FEW[1], *_GATED_DELTA_NET, "split_matmul", *_FEW[1]], 1),
    ("GatedDeltaNet", 64, 4, [*_MORE[0], *_GATED_DELTA_NET, *_MORE[1]], 3),
    ("Attention", 1, 1, [*_FEW[0], *_ATTENTION, "split_matmul", *_FEW[0]], 0),
    ("Attention", 1, 4, [*_FEW[1], *_ATTENTION, "split_matmul", *_FEW[1]], 0),
    ("Attention", 64, 4, [*_MORE[0], *_ATTENTION, *_MORE[1]], 0),
]


@pytest.mark.parametrize(("kind", "rows", "width", "kernels", "fusions"), LAYERS)
def test_a_layer_is_its_kernels(h200, monkeypatch, kind, rows, width, kernels, fusions):
    """Between them nothing is left of a step.

    Before the first layer's replay XLA puts together what all layers' ask of the rows.
    """
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    config = parse_config(SHAPES["qwen3.5-0.8b"].config())
    model = nnx.eval_shape(lambda: Qwen3_5(config, jnp.dtype("bfloat16")))
    (layer, *_) = (x for x in model.trunk.layers[1:] if type(x.mixer).__name__ == kind)
    graph, params = nnx.split(layer)
    dtypes = map(jnp.dtype, ("bfloat16", "bfloat16", "float32"))
    specs = model.cache_specs(CacheOptions(*dtypes, Replay(default_window(4))))
    pools = jax.eval_shape(lambda: allocate(specs, PoolSizes(64, 16, 3, width)))

    def step(params, x, delta, decode, per_token, tables, angles, pools):
        inputs = ModelInputs(*(per_token,) * 3, per_token >= 0, tables, decode, None, width)
        return nnx.merge(graph, params)(x, delta, LayerInputs(inputs, angles), pools)

    tokens = rows * width
    operands = (
        params,
        array(tokens, config.hidden_size, dtype=jnp.bfloat16),
        array(8, tokens, config.hidden_size),
        DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5),
        array(tokens, dtype=jnp.int32),
        array(3, 16, dtype=jnp.int32),
        (array(tokens, config.rope.rotary_dim // 2),) * 2,
        pools,
    )
    program = compile_for(h200, monkeypatch, step, operands, donated=7).as_text()
    names = r'custom_call_target="mosaic_gpu_v2".*?op_name="jit\(step\)/jit\(_?(\w+?)(?:_kernel)?\)'
    last = "gated_matmul" if tokens <= 8 else "split_gemm"
    assert re.findall(names, program) == [*kernels, last]
    assert len(re.findall(r"= [^=]* fusion\(", program)) <= fusions
