"""Every kernel compiles to sm_90a machine code, without a copy of a pool or spills but for stated.

No GPU is needed, only two wheels (142 MB) of jax's version, 0.11 or later:
`pip install --no-deps jax-cuda13-pjrt jax-cuda13-plugin`; where there is no GPU, run with
`JAX_PLATFORMS=cpu`.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.model_shapes import SHAPES
from benchmarks.measure.shapes import (
    GDN,
    MAMBA2,
    GdnShape,
    Mamba2Shape,
)
from jaxspec.models import parse_config
from jaxspec.models.base import ModelInputs
from jaxspec.models.cache import CacheSizes, init_cache
from jaxspec.models.layers.mixer import LayerInputs
from jaxspec.models.qwen3_5 import Qwen3_5
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay
from jaxspec.pallas.gated_delta.heads import GdnHeads
from jaxspec.pallas.gated_delta.replay import GdnRing
from jaxspec.pallas.gated_delta.replay_kernel import gdn_replay_kernel
from jaxspec.pallas.mamba2.replay import Mamba2Ring
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import as_kept, ring_rows
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user


REPLAY_CASES = [  # shape, dtype, width, rows; of 1, 2 and 16 rows a head takes 4, 2 and 1 block
    *((GDN["qwen3.5-9b"], jnp.float32, width, rows) for width in (1, 4, 8) for rows in (1, 16)),
    *((GDN["qwen3.5-9b"], jnp.float16, width, rows) for width in (1, 4, 8) for rows in (1, 16)),
    (GDN["qwen3.5-9b"], jnp.bfloat16, 4, 16),
    (GDN["qwen3.5-9b"], jnp.float32, 4, 2),
    *((GdnShape(2, 4, 64, 64), dtype, 4, 64) for dtype in (jnp.float32, jnp.float16)),
    *(
        (shape, dtype, 4, 16)
        for shape in GDN.values()
        if shape != GDN["qwen3.5-9b"]
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)
    ),
]


@pytest.mark.parametrize(("shape", "dtype", "width", "rows"), REPLAY_CASES, ids=str)
def test_gdn_replay(h200, monkeypatch, capfd, shape, dtype, width, rows):
    """In one layer with its output norm, where a head is one block's."""

    def step(q, k, v, g, beta, states, ring, gates, weight, *index):
        norm = GatedNorm(gates, weight, first=shape.conv_dim, eps=1e-6)
        for layer, norm_of in enumerate((None, norm)):
            v, states, ring = gdn_replay_kernel(
                *(q, k, v, g, beta, states, ring, jnp.int32(layer), *index, norm_of)
            )
        return v, states, ring

    key = array(rows, width, shape.key_heads, shape.key_dim)
    value = array(rows, width, shape.value_heads, shape.value_dim)
    gate = array(rows, width, shape.value_heads)
    pools = replay_pools(shape, dtype, width)
    index = [array(rows, dtype=jnp.int32)] * 4
    columns = shape.conv_dim + shape.value_heads * shape.value_dim
    norm = array(rows * width, columns, dtype=jnp.bfloat16), array(shape.value_dim)
    operands = (key, key, value, gate, gate, *pools, *norm, *index)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=(5, 6))
    assert_lean(compiled, capfd.readouterr().out, pools)
    assert_asks_once(compiled, rows)


def replay_pools(shape, dtype, width):
    """Checkpoints and ring of two layers."""
    lead = 2, 33
    states = array(*lead, 1, shape.value_heads, shape.value_dim, shape.key_dim, dtype=dtype)
    lead = *lead, ring_rows(width, jnp.dtype(dtype).itemsize)
    return states, GdnRing(
        array(*lead, shape.key_heads, shape.key_dim, dtype=dtype),
        array(*lead, shape.value_heads, shape.value_dim, dtype=dtype),
        array(*lead, shape.value_heads),
    )


def assert_asks_once(compiled, rows):
    """What a replay's blocks ask of the rows, both layers together."""
    program = compiled.as_text()
    asked = re.findall(rf"= s32\[6,{rows}\]\S* fusion", program[program.index("ENTRY") :])
    assert len(asked) == 1


@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("shape", "dtype", "width", "rows"), REPLAY_CASES, ids=str)
def test_gdn_conv_replay(h200, monkeypatch, capfd, shape, dtype, width, rows, x_dtype):
    """As in a model: with its output norm, where a head is one block's."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)

    def step(projected, taps, decay, conv, states, ring, weight, *index):
        x = projected.reshape(rows, width, -1)
        norm = GatedNorm(projected, weight, first=shape.conv_dim, eps=1e-6)
        outs, pools = [], (conv, states, ring)
        for layer in range(2):
            out, *pools = gdn_conv_replay(x, taps.T, decay, *pools, layer, *index, heads, norm)
            outs.append(out)
        return outs, pools

    projected = array(rows * width, shape.projected, dtype=x_dtype)
    taps, decay = array(4, shape.conv_dim, dtype=x_dtype), array(shape.value_heads, 2)
    pools = (
        array(2, 33, 3 + width, shape.conv_dim, dtype=x_dtype),
        *replay_pools(shape, dtype, width),
    )
    index = [array(rows, dtype=jnp.int32)] * 4
    operands = (projected, taps, decay, *pools, array(shape.value_dim), *index)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=(3, 4, 5))
    assert_lean(compiled, capfd.readouterr().out, pools)
    assert_asks_once(compiled, rows)


MAMBA2_CASES = [  # shape, dtypes of states and of tokens, width
    (MAMBA2["nemotron-3-nano"], dtype, x_dtype, width)
    for dtype, x_dtype in (
        (jnp.float32, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.bfloat16),
    )
    for width in (1, 4, 8)
] + [
    *((MAMBA2["nemotron-h-8b"], jnp.float32, jnp.bfloat16, width) for width in (1, 4, 8)),
    (Mamba2Shape(4, 2, 128, 64), jnp.float32, jnp.bfloat16, 8),
    (Mamba2Shape(4, 2, 128, 64), jnp.float16, jnp.float32, 1),
]


def mamba2_tokens(shape, rows, width, dtype):
    """x, dt, A, B, C, D."""
    x = array(rows, width, shape.heads, shape.head_dim, dtype=dtype)
    b = array(rows, width, shape.groups, shape.state_dim, dtype=dtype)
    a = array(shape.heads)
    return x, array(rows, width, shape.heads), a, b, b, a


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(("shape", "dtype", "x_dtype", "width"), MAMBA2_CASES, ids=str)
def test_mamba2_replay(h200, monkeypatch, capfd, shape, dtype, x_dtype, width, together):
    from jaxspec.pallas.mamba2.replay_kernel import replay

    def step(x, dt, a, b, c, d, states, ring, *index):
        for layer in range(2):
            tokens = (x.astype(x_dtype), dt, a, b, c, d)
            x, states, ring = replay(
                *(*tokens, states, ring, jnp.int32(layer), *index), together=together
            )
        return x, states, ring

    states = array(2, 33, 1, shape.heads, shape.head_dim, shape.state_dim, dtype=dtype)
    lead = 2, 33, ring_rows(width, jnp.dtype(dtype).itemsize)
    ring = Mamba2Ring(
        array(*lead, shape.heads, shape.head_dim, dtype=dtype),
        array(*lead, shape.groups, shape.state_dim, dtype=dtype),
        array(*lead, shape.heads),
    )
    index = [array(4, dtype=jnp.int32)] * 4
    operands = (*mamba2_tokens(shape, 4, width, x_dtype), states, ring, *index)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=(6, 7))
    assert_lean(compiled, capfd.readouterr().out, (states, ring))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_a_ring_keeps_is_rounded_on_a_gpu_too(h200, monkeypatch):
    """Of a cast there and back nothing is left there."""

    def conversions(step):
        program = compile_for(h200, monkeypatch, step, (array(64, 128),)).as_text()
        return len(re.findall(r" convert\(", program))

    assert conversions(lambda x: x * as_kept(x, jnp.bfloat16)) == 2
    assert conversions(lambda x: x * x.astype(jnp.bfloat16).astype(jnp.float32)) == 0


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
    sizes = CacheSizes(64, 16, 3, width - 1, ring_rows(width, 4))
    dtypes = map(jnp.dtype, ("bfloat16", "float32"))
    cache = jax.eval_shape(lambda: init_cache(model.cache_shape(), sizes, *dtypes))

    def step(params, x, delta, decode, per_token, tables, angles, cache):
        inputs = ModelInputs(*(per_token,) * 3, tables, decode, None, width)
        return nnx.merge(graph, params)(x, delta, LayerInputs(inputs, angles), cache)

    tokens = rows * width
    operands = (
        params,
        array(tokens, config.hidden_size, dtype=jnp.bfloat16),
        array(8, tokens, config.hidden_size),
        DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5),
        array(tokens, dtype=jnp.int32),
        array(3, 16, dtype=jnp.int32),
        (array(tokens, config.rope.rotary_dim // 2),) * 2,
        cache,
    )
    program = compile_for(h200, monkeypatch, step, operands, donated=7).as_text()
    names = r'custom_call_target="mosaic_gpu_v2".*?op_name="jit\(step\)/jit\(_?(\w+?)(?:_kernel)?\)'
    last = "gated_matmul" if tokens <= 8 else "split_gemm"
    assert re.findall(names, program) == [*kernels, last]
    assert len(re.findall(r"= [^=]* fusion\(", program)) <= fusions
