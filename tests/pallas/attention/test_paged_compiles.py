"""The kernels of paged_attention compile for an H200: no copy of the pool, and spills as stated."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import ATTENTION, AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.paged_tiling import choose_tiling, max_query_rows
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user

CONTEXT = 4096
CASES = [  # shape, dtype, rows, width, page size: one query tile a row, and several
    *(
        (shape, *case, 16)
        for shape in (*ATTENTION.values(), AttentionShape(14, 2, 128))
        for case in (
            (jnp.bfloat16, 1, 4),
            (jnp.bfloat16, 64, 1),
            (jnp.bfloat16, 64, 9),
            (jnp.float8_e4m3fn, 1, 4),
            (jnp.float8_e4m3fn, 64, 9),
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


@pytest.mark.parametrize(("shape", "dtype", "rows", "width", "page_size"), CASES, ids=str)
def test_paged_attention(h200, monkeypatch, capfd, shape, dtype, rows, width, page_size):
    """Pools of 8 bits are scaled, which needs more registers."""
    from jaxspec.pallas.attention.paged_kernel import paged_attention_kernel

    def step(queries, kv, tables, region, projected, scales):
        for gate in (OutputGate(projected), None):
            queries = paged_attention_kernel(
                queries, kv, jnp.int32(1), tables, region, gate, scales
            )
        return queries, kv

    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    queries = array(rows, width, shape.heads, shape.head_dim, dtype=wide)
    pool = array(2, 2, 32768, page_size, shape.kv_heads, shape.head_dim, dtype=dtype)
    tables = array(rows + 1, CONTEXT // page_size, dtype=jnp.int32)
    region = DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5)
    projected = array(rows * width, 2 * shape.heads * shape.head_dim, dtype=wide)
    scales = array(2) if dtype == jnp.float8_e4m3fn else None
    operands = queries, pool, tables, region, projected, scales
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    # With a ring of one tile, registers run out by one to five.
    spills = 20 if stages(shape, dtype, rows, width) == 1 else 0
    assert_lean(compiled, capfd.readouterr().out, pool, spills=spills)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 4), (64, 1)])
def test_paged_attention_with_sinks(h200, monkeypatch, capfd, dtype, rows, width):
    """The heads of gpt-oss."""
    from jaxspec.pallas.attention.paged_kernel import paged_attention_kernel

    def step(queries, kv, tables, region, sinks):
        layer = jnp.int32(1)
        return paged_attention_kernel(queries, kv, layer, tables, region, sinks=sinks), kv

    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    pool = array(2, 2, 32768, 16, 8, 64, dtype=dtype)
    region = DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5)
    tables = array(rows + 1, CONTEXT // 16, dtype=jnp.int32)
    operands = array(rows, width, 64, 64, dtype=wide), pool, tables, region, array(64)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)


def stages(shape, dtype, rows, width):
    """Tiles of the ring that the kernel chooses."""
    group = shape.heads // shape.kv_heads
    tokens = min(width, max_query_rows(dtype, shape.head_dim) // group)
    blocks, itemsize = rows * shape.kv_heads * -(-width // tokens), jnp.dtype(dtype).itemsize
    return choose_tiling(blocks, CONTEXT, shape.head_dim, itemsize, tokens * group).stages


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 4), (64, 4)])
@pytest.mark.parametrize(
    ("shape", "window"), [(AttentionShape(64, 8, 64), 128), (AttentionShape(32, 16, 256), 1024)]
)
def test_attention_to_a_window(h200, monkeypatch, capfd, dtype, rows, width, shape, window):
    """The heads and windows of gpt-oss and Gemma 4; the rings are written and not copied."""
    from jaxspec.pallas.attention.ring_tables import ring_length
    from jaxspec.pallas.attention.window import window_attention

    def step(queries, keys, values, pool, region):
        return window_attention(queries, keys, values, pool, 1, region, window=window)

    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))
    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    heads = shape.kv_heads, shape.head_dim
    pool = array(2, rows + 1, ring_length(window, width), 2, *heads, dtype=dtype)
    tokens = array(rows, width, *heads, dtype=wide)
    region = DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5)
    queries = array(rows, width, shape.heads, shape.head_dim, dtype=wide)
    operands = queries, tokens, tokens, pool, region
    compiled = compile_for(h200, monkeypatch, step, operands, donated=3)
    assert_lean(compiled, capfd.readouterr().out, pool, spills=20)
