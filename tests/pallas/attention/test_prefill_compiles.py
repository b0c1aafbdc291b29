"""The kernel of prefill_attention compiles for an H200: no copy of the pool.

It is that of window_prefill, too.
"""

import re

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for, operand_starts

from benchmarks.measure.shapes import ATTENTION, AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.prefill import prefill_attention
from jaxspec.pallas.attention.ring_tables import ring_length
from jaxspec.pallas.attention.window import window_prefill
from jaxspec.regions import PrefillRegion

OPTIMIZED = True  # as for a user
GPT_OSS = AttentionShape(64, 8, 64)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("shape", [*ATTENTION.values(), GPT_OSS], ids=str)
def test_prefill_attention(h200, monkeypatch, capfd, shape, dtype):
    """Pools of 8 bits are scaled, which needs more registers; gpt-oss has sinks."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(queries, kv, tables, chunks, *more):
        for layer in range(2):
            queries = prefill_attention(queries, kv, layer, tables, chunks, *more)
        return queries, kv

    seqs, tokens = 5, 2048
    queries = array(tokens, shape.heads, shape.head_dim, dtype=jnp.bfloat16)
    pool = array(2, 2, 32768, 16, shape.kv_heads, shape.head_dim, dtype=dtype)
    index, starts = (array(n, dtype=jnp.int32) for n in (seqs, seqs + 1))
    chunks = PrefillRegion(slots=index, num_computed=index, query_start=starts, state_offset=index)
    scales = array(2) if dtype == jnp.float8_e4m3fn else None
    sinks = array(shape.heads) if shape == GPT_OSS else None
    operands = queries, pool, array(65, 256, dtype=jnp.int32), chunks, scales, sinks
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    spills = 64 if shape.heads // shape.kv_heads == 16 else 0
    assert_lean(compiled, capfd.readouterr().out, pool, spills=spills)
    schedules = re.findall(r"custom-call\((%[\w.]+),", compiled.as_text())
    assert len(schedules) == 2 and len(set(schedules)) == 1  # one for all layers


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize(
    ("shape", "window"),
    [(GPT_OSS, 128), (AttentionShape(16, 8, 256), 1024), (AttentionShape(8, 1, 256), 512)],
    ids=str,
)
def test_window_prefill(h200, monkeypatch, capfd, shape, window, dtype):
    """As of gpt-oss, with its sinks, Gemma 4 26B-A4B and Gemma 4 E2B."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(queries, keys, values, pool, chunks, scales, sinks):
        options = {"window": window, "scales": scales, "sinks": sinks}
        for layer in range(2):
            queries, pool = window_prefill(queries, keys, values, pool, layer, chunks, **options)
        return queries, pool

    seqs, tokens, slots = 3, 2048, 512
    queries = array(tokens, shape.heads, shape.head_dim, dtype=jnp.bfloat16)
    new = array(tokens, shape.kv_heads, shape.head_dim, dtype=jnp.bfloat16)
    rings = slots, ring_length(window, 4), 2, shape.kv_heads, shape.head_dim
    pool = array(2, *rings, dtype=dtype)
    index, starts = (array(n, dtype=jnp.int32) for n in (seqs, seqs + 1))
    chunks = PrefillRegion(slots=index, num_computed=index, query_start=starts, state_offset=index)
    scales = array(2) if dtype == jnp.float8_e4m3fn else None
    sinks = array(shape.heads) if shape == GPT_OSS else None
    operands = queries, new, new, pool, chunks, scales, sinks
    compiled = compile_for(h200, monkeypatch, step, operands, donated=3)
    assert_lean(compiled, capfd.readouterr().out, pool)
    schedules = re.findall(r"custom-call\((%[\w.]+),", compiled.as_text())
    assert len(schedules) == 2 and len(set(schedules)) == 1  # one for all layers


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 4)])
def test_queries_behind_those_of_decode_rows_begin_where_the_kernel_reads_them(
    h200, monkeypatch, heads, kv_heads
):
    """A token of 9 heads of 64, as SmolLM2-135M has them, is 1,152 bytes: no multiple of 256."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(queries, kv, tables, chunks):
        return prefill_attention((queries + queries)[1:], kv, 0, tables, chunks), kv

    index, starts = (array(n, dtype=jnp.int32) for n in (2, 3))
    chunks = PrefillRegion(slots=index, num_computed=index, query_start=starts, state_offset=index)
    queries = array(257, heads, 64, dtype=jnp.bfloat16)
    pool = array(1, 2, 64, 16, kv_heads, 64, dtype=jnp.bfloat16)
    operands = queries, pool, array(3, 16, dtype=jnp.int32), chunks
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    assert operand_starts(compiled.as_text()) == ([1024] if heads == 8 else [])
