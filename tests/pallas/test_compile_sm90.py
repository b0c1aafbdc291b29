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
    ATTENTION,
    GDN,
    HIDDEN,
    INTERMEDIATE,
    MAMBA2,
    AttentionShape,
    GdnShape,
    Mamba2Shape,
)
from jaxspec.cache import CacheOptions, PoolSizes, Replay, allocate
from jaxspec.models.base import ModelInputs
from jaxspec.models.config import parse_config
from jaxspec.models.qwen3_5 import Qwen3_5
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.inputs import attention_inputs
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.prefill import prefill_attention
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay
from jaxspec.pallas.gated_delta.heads import GdnHeads
from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_kernel
from jaxspec.pallas.gated_delta.prefill import gdn_prefill
from jaxspec.pallas.gated_delta.replay import GdnRing
from jaxspec.pallas.gated_delta.replay_kernel import gdn_replay_kernel
from jaxspec.pallas.gated_delta.step_kernel import gdn_step_kernel
from jaxspec.pallas.mamba2.prefill import mamba2_prefill
from jaxspec.pallas.mamba2.replay import Mamba2Ring
from jaxspec.pallas.mamba2.step_kernel import mamba2_step_kernel
from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul
from jaxspec.pallas.matmul.gemm import MOST_PARTS, choose
from jaxspec.pallas.matmul.matmul_silu import matmul_silu
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.split_matmul import gated_matmul, gated_norm_matmul, split_matmul
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.paging.kv_write import kv_write
from jaxspec.pallas.paging.slot_mapping_kernel import slot_mapping_kernel
from jaxspec.pallas.recurrent.conv_update import conv_update
from jaxspec.pallas.recurrent.replay import as_kept, ring_rows
from jaxspec.pallas.recurrent.state_select_kernel import state_select_kernel
from jaxspec.plan import MAX_STOP_IDS
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 2, 64, 64)], ids=str)
def test_gdn_step(h200, monkeypatch, capfd, shape, dtype, width):
    def step(q, k, v, g, beta, states, slots, offset, query_len):
        for layer in range(2):
            v, states = gdn_step_kernel(
                *(q, k, v, g, beta, states, jnp.int32(layer), slots, offset, query_len)
            )
        return v, states

    rows = 4
    key = array(rows, width, shape.key_heads, shape.key_dim)
    value = array(rows, width, shape.value_heads, shape.value_dim)
    gate = array(rows, width, shape.value_heads)
    pool = array(2, 9, 8, shape.value_heads, shape.value_dim, shape.key_dim, dtype=dtype)
    index = array(rows, dtype=jnp.int32)
    operands = (key, key, value, gate, gate, pool, index, index, index)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=5)
    assert_lean(compiled, capfd.readouterr().out, pool)


def test_a_pool_is_written_in_place_by_several_steps_too(h200, monkeypatch):
    """As a program of `steps_per_dispatch` steps does: the pool goes round a loop."""
    shape, rows = GDN["qwen3.5-9b"], 4

    def step(states, q, v, gate, index):
        def once(states, _):
            zero, index_ = jnp.int32(0), (index, index, index)
            out, states = gdn_step_kernel(q, q, v, gate, gate, states, zero, *index_)
            return states, out

        return jax.lax.scan(once, states, length=3)

    key = array(rows, 1, shape.key_heads, shape.key_dim)
    value = array(rows, 1, shape.value_heads, shape.value_dim)
    pool = array(2, 9, 1, shape.value_heads, shape.value_dim, shape.key_dim)
    gate, index = array(rows, 1, shape.value_heads), array(rows, dtype=jnp.int32)
    operands = pool, key, value, gate, index
    memory = compile_for(h200, monkeypatch, step, operands, donated=0).memory_analysis()
    assert memory.alias_size_in_bytes == pool.size * 4
    assert memory.temp_size_in_bytes < pool.size / 8


@pytest.mark.parametrize(
    ("dtype", "states_dtype"),
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.float16),
        (jnp.float16, jnp.float32),
    ],
)
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 2, 64, 64)], ids=str)
def test_gdn_prefill(h200, monkeypatch, capfd, shape, dtype, states_dtype):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)

    def step(q, k, v, g, beta, states, *index):
        for layer in range(2):
            out, states = gdn_prefill(q, k, v, g, beta, states, layer, *index)
            v = out.astype(v.dtype)
        return v, states

    tokens, seqs = 128, 3
    key = array(tokens, shape.key_heads, shape.key_dim)
    value = array(tokens, shape.value_heads, shape.value_dim, dtype=dtype)
    gate = array(tokens, shape.value_heads)
    pool = (2, 65, 4, shape.value_heads, shape.value_dim, shape.key_dim)
    pool = array(*pool, dtype=states_dtype)
    index, start = array(seqs, dtype=jnp.int32), array(seqs + 1, dtype=jnp.int32)
    operands = (key, key, value, gate, gate, pool, index, index, index, start)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=5)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "while(" not in compiled.as_text()  # which the host would wait for


PAGED_CASES = [  # shape, dtype, rows, width, page size: up to a tile, and of several tiles
    *(
        (shape, *case, 16)
        for shape in (*ATTENTION.values(), AttentionShape(14, 2, 128))
        for case in (
            *((jnp.bfloat16, *sizes) for sizes in ((1, 4), (64, 1), (64, 9))),
            *((jnp.float8_e4m3fn, *sizes) for sizes in ((1, 4), (64, 9))),
            (jnp.float32, 1, 9),
        )
    ),
    *(
        (ATTENTION[model], jnp.bfloat16, 64, 4, page_size)
        for model in ("qwen3.5-27b", "qwen3-8b", "llama-3.2-1b")
        for page_size in (32, 64)
    ),
    *(
        (ATTENTION["qwen3.5-9b"], dtype, 1, 4, page_size)
        for dtype in (jnp.float8_e4m3fn, jnp.float32)
        for page_size in (32, 64)
    ),
]


@pytest.mark.parametrize(("shape", "dtype", "rows", "width", "page_size"), PAGED_CASES, ids=str)
def test_paged_attention(h200, monkeypatch, capfd, shape, dtype, rows, width, page_size):
    from jaxspec.pallas.attention.paged_kernel import attend, plan_for
    from jaxspec.pallas.attention.paged_tiling import query_rows

    def step(queries, kv, tables, slots, start, count, projected):
        for gate in (OutputGate(projected), None):
            queries = attend(queries, kv, jnp.int32(1), tables, slots, start, count, gate)
        return queries, kv

    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    queries = array(rows, width, shape.heads, shape.head_dim, dtype=wide)
    pool = array(2, 2, 32768, page_size, shape.kv_heads, shape.head_dim, dtype=dtype)
    pages = 4096 // page_size  # of a row
    tables, index = array(rows + 1, pages, dtype=jnp.int32), array(rows, dtype=jnp.int32)
    projected = array(rows * width, 2 * shape.heads * shape.head_dim, dtype=wide)
    operands = (queries, pool, tables, index, index, index, projected)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    # With a ring of one tile registers run out by one to five.
    group, most = shape.heads // shape.kv_heads, query_rows(dtype, shape.head_dim)
    tokens = min(width, most // group)
    blocks = rows * shape.kv_heads * -(-width // tokens)
    itemsize = jnp.dtype(dtype).itemsize
    plan = plan_for(blocks, 4096, shape.head_dim, itemsize, tokens * group)
    spills = 20 if plan.stages == 1 else 0
    assert_lean(compiled, capfd.readouterr().out, pool, spills=spills)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_kv_write(h200, monkeypatch, dtype):
    """No kernel, but XLA must neither widen nor copy a pool of 8 bits to scatter into it."""
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)

    def step(kv, keys, slots):
        for layer in range(2):
            kv = kv_write(kv, layer, keys, keys, slots)
            keys = keys + kv[layer, 0, slots[:1], 0].astype(keys.dtype)
        return kv

    pool = array(2, 2, 32768, 16, 8, 128, dtype=dtype)
    operands = pool, array(256, 8, 128, dtype=jnp.bfloat16), array(256, dtype=jnp.int32)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=0)
    assert not re.findall(r"copy(-start)?\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.size * pool.dtype.itemsize
    assert memory.temp_size_in_bytes < 2**24


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


@pytest.mark.parametrize(("shape", "dtype", "x_dtype", "width"), MAMBA2_CASES, ids=str)
def test_mamba2_step(h200, monkeypatch, capfd, shape, dtype, x_dtype, width):
    def step(x, dt, a, b, c, d, states, *index):
        for layer in range(2):
            tokens = (x.astype(x_dtype), dt, a, b, c, d)
            x, states = mamba2_step_kernel(*tokens, states, jnp.int32(layer), *index)
        return x, states

    pool = array(2, 9, 8, shape.heads, shape.head_dim, shape.state_dim, dtype=dtype)
    operands = (*mamba2_tokens(shape, 4, width, x_dtype), pool, *[array(4, dtype=jnp.int32)] * 3)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=6)
    assert_lean(compiled, capfd.readouterr().out, pool)


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


PREFILL_CASES = [  # shape, dtypes of tokens and of states, tokens: 256 are one tile a sequence
    *((shape, jnp.bfloat16, jnp.float32, 2048) for shape in MAMBA2.values()),
    (MAMBA2["nemotron-3-nano"], jnp.bfloat16, jnp.float32, 256),
    (MAMBA2["nemotron-3-nano"], jnp.bfloat16, jnp.float16, 2048),
    (MAMBA2["nemotron-3-nano"], jnp.float16, jnp.float32, 2048),
    (Mamba2Shape(4, 2, 128, 64), jnp.bfloat16, jnp.bfloat16, 2048),
    (Mamba2Shape(4, 2, 128, 128), jnp.bfloat16, jnp.float32, 2048),
]


@pytest.mark.parametrize(("shape", "dtype", "states_dtype", "tokens"), PREFILL_CASES, ids=str)
def test_mamba2_prefill(h200, monkeypatch, capfd, shape, dtype, states_dtype, tokens):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)

    def step(x, dt, a, b, c, d, states, *index):
        for layer in range(2):
            out, states = mamba2_prefill(x, dt, a, b, c, d, states, layer, *index)
            x = out.astype(x.dtype)
        return x, states

    seqs = 3
    flat = [array(*y.shape[1:], dtype=y.dtype) for y in mamba2_tokens(shape, 1, tokens, dtype)]
    of_tokens = (*flat[:2], array(shape.heads), *flat[3:5], array(shape.heads))
    pool = (2, 257, 4, shape.heads, shape.head_dim, shape.state_dim)
    pool = array(*pool, dtype=states_dtype)
    index, start = array(seqs, dtype=jnp.int32), array(seqs + 1, dtype=jnp.int32)
    operands = (*of_tokens, pool, index, index, index, start)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=6)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "while(" not in compiled.as_text()  # which the host would wait for


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", GDN.values(), ids=str)
def test_conv_update(h200, monkeypatch, capfd, shape, dtype, width):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)

    def step(x, taps, conv, *index):
        for layer in range(2):
            x, conv = conv_update(x, taps.T, conv, layer, *index)
        return x, conv

    rows, channels = 4, shape.conv_dim
    x, taps = array(rows, width, channels, dtype=dtype), array(4, channels, dtype=dtype)
    pool, index = array(2, 65, 12, channels, dtype=dtype), array(rows, dtype=jnp.int32)
    operands = (x, taps, pool, index, index, index)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=2)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "transpose(" not in compiled.as_text()  # the caller's and the op's cancel


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(8, 16, 64, 64)], ids=str)
def test_gdn_inputs(h200, monkeypatch, capfd, shape, dtype, width):
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)

    def step(x, taps, decay, conv, *index):
        outputs = []
        for layer in range(2):
            *new, conv = gdn_inputs_kernel(x, taps, decay, conv, jnp.int32(layer), *index, heads)
            outputs += new
        return outputs, conv

    rows, channels = 4, shape.conv_dim
    columns = channels + shape.value_heads * (shape.value_dim + 2)
    x, taps = array(rows, width, columns, dtype=dtype), array(4, channels, dtype=dtype)
    pool, index = array(2, 65, 12, channels, dtype=dtype), array(rows, dtype=jnp.int32)
    operands = (x, taps, array(shape.value_heads, 2), pool, index, index, index)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=3)
    assert_lean(compiled, capfd.readouterr().out, pool)
    # Nor is the projection cut up: the kernel reads it where it lies.
    assert not re.findall(r"(slice|fusion)\(", compiled.as_text())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("features", [512, *HIDDEN.values(), 8192])
def test_add_norm(h200, monkeypatch, capfd, features, dtype):
    """At every model's width."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)

    def step(x, delta, weight):
        return add_norm(x, delta, weight, 1e-6, zero_centred=True)

    tokens, weight = array(4, features, dtype=dtype), array(features, dtype=dtype)
    compiled = compile_for(h200, monkeypatch, step, (tokens, tokens, weight))
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("features", [1024, 5120])
def test_add_norm_of_parts(h200, monkeypatch, capfd, features):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)

    def step(x, delta, weight):
        return add_norm(x, delta, weight, 1e-6, zero_centred=True)

    x, weight = (array(*dims, features, dtype=jnp.bfloat16) for dims in ((4,), ()))
    compiled = compile_for(h200, monkeypatch, step, (x, array(8, 4, features), weight))
    assert_lean(compiled, capfd.readouterr().out)


SMALL = "qwen3.5-0.8b", "qwen3.5-2b"  # models whose products of few rows are kernels
PROJECTED = GDN[SMALL[0]].projected


@pytest.mark.parametrize(("tokens", "parts"), [(1, True), (2, True), (8, 0), (2, None)])
@pytest.mark.parametrize("columns", ["in_proj", "qkv", "gate_up"])
@pytest.mark.parametrize("model", SMALL)
def test_norm_matmul(h200, monkeypatch, capfd, model, columns, parts, tokens):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)
    features = HIDDEN[model]
    parts = parts and 8192 // features  # as many as `split_matmul` makes

    def step(x, delta, norm, weight):
        total, y = norm_matmul(x, delta, norm, 1e-6, weight, zero_centred=True)
        return y if delta is None else (total, y)  # not what was given: that would be a copy

    x = array(tokens, features, dtype=jnp.bfloat16)
    outer = {"in_proj": PROJECTED, "qkv": 5120, "gate_up": 2 * INTERMEDIATE[model]}[columns]
    weight = array(features, outer, dtype=jnp.bfloat16)
    delta = array(parts, tokens, features) if parts else (None if parts is None else x)
    operands = x, delta, array(features, dtype=jnp.bfloat16), weight
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("model", SMALL)
def test_split_matmul(h200, monkeypatch, capfd, model, tokens):
    """The feed-forward layer's, its gate in it, and both after a mixer, one with its norm."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)
    shape, outer = GDN[SMALL[0]], HIDDEN[model]

    def step(x, down, attended, out, heads, gates, norm):
        gated = GatedNorm(gates, norm, first=shape.conv_dim, eps=1e-6)
        gated = gated_norm_matmul(heads, gated, out)
        return gated_matmul(x, down), split_matmul(attended, out), gated

    sizes = (tokens, 2 * INTERMEDIATE[model]), (INTERMEDIATE[model], outer), (tokens, 2048)
    products = [array(*dims, dtype=jnp.bfloat16) for dims in (*sizes, (2048, outer))]
    heads, norm = array(tokens, shape.value_heads, shape.value_dim), array(shape.value_dim)
    operands = *products, heads, array(tokens, PROJECTED, dtype=jnp.bfloat16), norm
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)
    assert not re.findall(r"(slice|fusion)\(", compiled.as_text())  # no gates cut out


@pytest.mark.parametrize(
    ("model", "tokens"), [*((model, 64) for model in HIDDEN), (SMALL[0], 16), (SMALL[0], 256)]
)
def test_gemm(h200, monkeypatch, capfd, model, tokens):
    """Behind a norm, gated, and in parts."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)
    features, inner = HIDDEN[model], INTERMEDIATE[model]

    def step(x, norm, qkv, gate_up, down):
        _, projected = norm_matmul(x, x, norm, 1e-6, qkv)
        return projected, split_matmul(matmul_silu(x, gate_up), down)

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
def test_gemm_wave(h200, monkeypatch, capfd, model, product, columns, tokens):
    from jaxspec.pallas.matmul import gemm_kernel

    is_split, gates = product == "split_gemm", product == "matmul_silu"
    inner = INTERMEDIATE[model] if is_split else HIDDEN[model]
    x, weight = (array(*dims, dtype=jnp.bfloat16) for dims in ((tokens, inner), (inner, columns)))
    options = {"gates": gates, "most_parts": MOST_PARTS if is_split else 1}
    why, wave = choose(x, weight, HIDDEN[model], **options)
    assert why is None and wave is not None
    kernel = getattr(gemm_kernel, f"{product}_kernel")

    def step(x, weight):
        return kernel(x, weight, wave)

    compiled = compile_for(h200, monkeypatch, step, (x, weight))
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("slots", [0, MAX_STOP_IDS])
@pytest.mark.parametrize(
    ("features", "tokens", "ids"),
    [
        *((1024, tokens, 248320) for tokens in (8, 12, 36, 64, 128, 136, 200, 256, 260)),
        *((4096, tokens, 248320) for tokens in (64, 256)),
        (4096, 64, 16384),
    ],
)
def test_argmax_matmul(h200, monkeypatch, capfd, features, tokens, ids, slots):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)
    dims = (tokens, features), (features, ids)
    operands = *[array(*d, dtype=jnp.bfloat16) for d in dims], array(tokens, slots, dtype=jnp.int32)
    compiled = compile_for(h200, monkeypatch, argmax_matmul, operands)
    assert_lean(compiled, capfd.readouterr().out, between=tokens * ids / 8)  # not the scores


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [*ATTENTION.values(), AttentionShape(4, 1, 64)], ids=str)
def test_attention_inputs(h200, monkeypatch, capfd, shape, dtype, gated):
    """Nor is a projection copied, which the kernel reads in two shapes; rotated is as published."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)
    rule = {"heads": shape.heads, "gated": gated, "eps": 1e-6, "zero_centred": gated}

    def step(qkv, norms, angles, kv, slots):
        for layer in range(2):
            queries, kv = attention_inputs(qkv, norms, angles, kv, layer, slots, **rule)
            qkv = jnp.sin(qkv) * queries[0, 0, 0]
        return queries, kv

    tokens, half = 64, shape.head_dim // (8 if gated else 2)
    columns = ((1 + gated) * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv, norms = array(tokens, columns, dtype=dtype), array(2, shape.head_dim, dtype=dtype)
    angles, slots = (array(tokens, half),) * 2, array(tokens, dtype=jnp.int32)
    pool = array(2, 2, 32768, 16, shape.kv_heads, shape.head_dim, dtype=dtype)
    compiled = compile_for(h200, monkeypatch, step, (qkv, norms, angles, pool, slots), donated=3)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "transpose(" not in compiled.as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", GDN.values(), ids=str)
def test_state_select(h200, monkeypatch, capfd, shape, dtype):
    def step(states, slots, state_offset):
        return state_select_kernel(states, jnp.int32(1), slots, state_offset)

    index = array(4, dtype=jnp.int32)
    states = array(2, 9, 4, shape.value_heads, shape.value_dim, shape.key_dim, dtype=dtype)
    compiled = compile_for(h200, monkeypatch, step, (states, index, index))
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("tokens", [64, 2047])
def test_slot_mapping(h200, monkeypatch, capfd, tokens):
    def step(*operands):
        return slot_mapping_kernel(*operands, page_size=16)

    index = array(tokens, dtype=jnp.int32)
    operands = (array(257, 2048, dtype=jnp.int32), index, index, array(tokens, dtype=jnp.bool_))
    compiled = compile_for(h200, monkeypatch, step, operands)
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("shape", ATTENTION.values(), ids=str)
def test_prefill_attention(h200, monkeypatch, capfd, shape, dtype):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, unsupported, **_: unsupported is None)

    def step(queries, kv, tables, *index):
        for layer in range(2):
            queries = prefill_attention(queries, kv, layer, tables, *index)
        return queries, kv

    seqs, tokens = 5, 2048
    queries = array(tokens, shape.heads, shape.head_dim, dtype=jnp.bfloat16)
    pool = array(2, 2, 32768, 16, shape.kv_heads, shape.head_dim, dtype=dtype)
    tables, index = array(65, 256, dtype=jnp.int32), array(seqs, dtype=jnp.int32)
    operands = (queries, pool, tables, index, index, array(seqs + 1, dtype=jnp.int32))
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)
    schedules = re.findall(r"custom-call\((%[\w.]+),", compiled.as_text())
    assert len(schedules) == 2 and len(set(schedules)) == 1  # one for all layers


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
LAYERS = [  # kind, rows, width, kernels, other fusions
    ("GatedDeltaNet", 1, 1, [*_FEW[0], *_GATED_DELTA_NET, "gated_norm_matmul", *_FEW[0]], 1),
    ("GatedDeltaNet", 1, 4, [*_FEW[1], *_GATED_DELTA_NET, "gated_norm_matmul", *_FEW[1]], 1),
    ("GatedDeltaNet", 8, 1, [*_FEW[1], *_GATED_DELTA_NET, "split_matmul", *_FEW[1]], 1),
    ("GatedDeltaNet", 64, 4, [*_MORE[0], *_GATED_DELTA_NET, *_MORE[1]], 3),
    ("GatedAttention", 1, 1, [*_FEW[0], "attention_inputs", "attend", "split_matmul", *_FEW[0]], 0),
    ("GatedAttention", 1, 4, [*_FEW[1], "attention_inputs", "attend", "split_matmul", *_FEW[1]], 0),
    ("GatedAttention", 64, 4, [*_MORE[0], "attention_inputs", "attend", *_MORE[1]], 0),
]


@pytest.mark.parametrize(("kind", "rows", "width", "kernels", "fusions"), LAYERS)
def test_a_layer_is_its_kernels(h200, monkeypatch, kind, rows, width, kernels, fusions):
    """Between them nothing is left of a step.

    Before the first layer's replay XLA puts together what all layers' ask of the rows.
    """
    monkeypatch.setattr("jaxspec.device.default_device", lambda: h200)
    config = parse_config(SHAPES["qwen3.5-0.8b"].config())
    model = nnx.eval_shape(lambda: Qwen3_5.for_config(config, jnp.dtype("bfloat16")))
    (layer, *_) = (x for x in model.layers[1:] if type(x.mixer).__name__ == kind)
    graph, params = nnx.split(layer)
    dtype, state_dtype = jnp.dtype("bfloat16"), jnp.dtype("float32")
    options = CacheOptions(dtype, dtype, state_dtype, Replay(window=32))
    sizes = PoolSizes(num_pages=64, page_size=16, num_slots=3, width=width)
    pools = jax.eval_shape(lambda: allocate(model.cache_specs(options), sizes))

    def step(params, x, delta, decode, per_token, tables, angles, pools):
        inputs = ModelInputs(*(per_token,) * 3, tables, decode, None, width)
        return nnx.merge(graph, params)(x, delta, inputs, angles, pools)

    tokens = rows * width
    operands = (
        params,
        array(tokens, config.hidden_size, dtype=jnp.bfloat16),
        array(8, tokens, config.hidden_size),
        DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5),
        array(tokens, dtype=jnp.int32),
        array(3, 16, dtype=jnp.int32),
        (array(tokens, config.rotary_dim // 2),) * 2,
        pools,
    )
    program = compile_for(h200, monkeypatch, step, operands, donated=7).as_text()
    names = r'custom_call_target="mosaic_gpu_v2".*?op_name="jit\(step\)/jit\(_?(\w+?)(?:_kernel)?\)'
    last = "gated_matmul" if tokens <= 8 else "split_gemm"
    assert re.findall(names, program) == [*kernels, last]
    assert len(re.findall(r"= [^=]* fusion\(", program)) <= fusions
