"""The cases of attention and of the pages it reads; `table.OPS` lists them."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import FEW, INPUTS, MANY, Case, about, live_rows
from benchmarks.measure.shapes import ATTENTION, WIDE_ATTENTION, AttentionShape
from jaxspec.pallas.attention.inputs import (
    QKNorm,
    attention_inputs,
    attention_inputs_reference,
)
from jaxspec.pallas.attention.paged import paged_attention, paged_attention_reference
from jaxspec.pallas.attention.prefill import prefill_attention
from jaxspec.pallas.attention.ring_tables import ring_length
from jaxspec.pallas.attention.window import (
    window_prefill,
    window_prefill_reference,
    window_read,
    window_read_reference,
)
from jaxspec.pallas.paging.slot_mapping import slot_mapping, slot_mapping_reference
from jaxspec.regions import DecodeRegion, PrefillRegion

PAGE_SIZE = 16
SHAPES = ATTENTION | WIDE_ATTENTION


def attention_inputs_cases() -> Iterator[Case]:
    """Tokens of a decode step of Qwen3.5-9B and of a prompt; the other models at one size."""
    for model in ("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b", "qwen3-8b"):
        for rows, width in ((64, 4), (64, 1), (8, 4), (1, 4), (1, 1), (8192, 1)):
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield _attention_inputs_case(model, jnp.dtype("bfloat16"), rows, width)
    yield _attention_inputs_case("qwen3.5-9b", jnp.dtype("float32"), 64, 4)


def _attention_inputs_case(model, dtype, rows, width):
    """A prompt's tokens are rows of one."""
    shape, rng = ATTENTION[model], np.random.default_rng(0)
    tokens, gated = rows * width, model.startswith("qwen3.5")
    half = shape.head_dim // (8 if gated else 2)
    columns = ((1 + gated) * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    keys = jax.random.split(jax.random.key(0), INPUTS)
    # Several, so that none is found in the cache.
    projections = tuple(jax.random.normal(key, (tokens, columns)).astype(dtype) for key in keys)
    angles = rng.normal(size=(tokens, half))
    angles = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    pages = 1 + -(-tokens // PAGE_SIZE)
    slots = PAGE_SIZE + rng.permutation((pages - 1) * PAGE_SIZE)[:tokens]
    norm = QKNorm(jnp.ones((2, shape.head_dim), dtype), eps=1e-6, zero_centred=gated)

    def run(op, pool, layer, projections, norm, angles, slots):
        qkv = projections[layer % INPUTS]
        return op(qkv, norm, angles, pool, layer, slots, heads=shape.heads, gated=gated)

    query_bytes, pool_bytes = (
        tokens * heads * shape.head_dim * dtype.itemsize
        for heads in (shape.heads, 2 * shape.kv_heads)
    )
    page = (PAGE_SIZE, shape.kv_heads, shape.head_dim)
    return Case(
        op="attention_inputs",
        about=about(model, shape, dtype, rows=rows, width=width),
        run=functools.partial(run, attention_inputs),
        reference=functools.partial(run, attention_inputs_reference),
        pool=lambda layers: jnp.zeros((layers, 2, pages, *page), dtype),
        layer_bytes=pool_bytes,
        operands=(projections, norm, angles, jnp.asarray(slots, jnp.int32)),
        total_bytes=2 * (query_bytes + pool_bytes + angles[0].nbytes) + 4 * tokens,
    )


def slot_mapping_cases() -> Iterator[Case]:
    """The latency: each call takes the slots of the one before as positions."""
    for rows, width in ((1, 4), (64, 4), (256, 8)):
        yield _slot_mapping_case(rows, width)


def _slot_mapping_case(rows, width, pages=2048):
    rng = np.random.default_rng(0)
    tables = jnp.asarray(rng.integers(1, 2**20, (1 + rows, pages)), jnp.int32)
    slots = jnp.repeat(live_rows(rows, width)[0], width)

    def run(op, positions, layer, tables, slots, live):
        # The barrier keeps XLA from making one program of several calls.
        out = jax.lax.optimization_barrier(op(tables, slots, positions, live, page_size=PAGE_SIZE))
        return out, out

    return Case(
        op="slot_mapping",
        about={"rows": rows, "width": width, "tokens": rows * width},
        run=functools.partial(run, slot_mapping),
        reference=functools.partial(run, slot_mapping_reference),
        pool=lambda layers: jnp.arange(rows * width, dtype=jnp.int32),
        layer_bytes=4 * rows * width,
        operands=(tables, slots, jnp.ones(rows * width, bool)),
        total_bytes=rows * width * (4 * 4 + 1),
        calls=2 * MANY,
    )


def paged_attention_cases() -> Iterator[Case]:
    """Many rows for all models; more sizes, pages and float32 on the heads of one or two."""
    for model in ATTENTION:
        yield _paged_attention_case(model, 64, 4096, 4)
        if model in ("qwen3-8b", "qwen3.5-9b"):
            for rows, context, width in ((1, 32768, 4), (8, 4096, 4), (64, 4096, 1)):
                yield _paged_attention_case(model, rows, context, width)
        if model == "qwen3-8b":
            yield _paged_attention_case(model, 64, 4096, 4, page_size=64)
        if model in ("qwen3-8b", "qwen3.5-9b"):
            for rows, context in ((64, 4096), (1, 32768)):
                yield _paged_attention_case(model, rows, context, 4, dtype="float8_e4m3fn")
        if model == "qwen3.5-9b":
            yield _paged_attention_case(model, 64, 4096, 4, dtype="float32")
    for rows, context in ((64, 4096), (1, 32768)):
        yield _paged_attention_case("gemma-4-26b-a4b", rows, context, 4)


def window_attention_cases() -> Iterator[Case]:
    """Reads of rings, with the heads and windows of gpt-oss 20B, Gemma 4 26B-A4B and E2B."""
    for model, shape, window in (
        ("gpt-oss-20b", AttentionShape(64, 8, 64), 128),
        ("gemma-4-26b-a4b", AttentionShape(16, 8, 256), 1024),
        ("gemma-4-e2b", AttentionShape(8, 1, 256), 512),
    ):
        for rows in (1, 64):
            yield _window_attention_case(model, shape, window, rows, width=4)


def _window_attention_case(model, shape, window, rows, width):
    rng, dtype, ring = np.random.default_rng(0), jnp.dtype("bfloat16"), ring_length(window, width)
    region = newest_tokens(_int32(1 + rng.permutation(rows)), 8 * ring, width)
    heads = shape.kv_heads, shape.head_dim
    layer_bytes = 2 * rows * (window - 1 + width) * math.prod(heads) * dtype.itemsize

    def pool(layers):
        """The rings, and the queries: a call's output, so that the calls follow each other."""
        keys = jax.random.split(jax.random.key(0))
        shapes = (layers, rows + 1, ring, 2, *heads), (rows, width, shape.heads, shape.head_dim)
        return tuple(map(functools.partial(jax.random.normal, dtype=dtype), keys, shapes))

    def run(op, pool, layer, region):
        rings, queries = pool
        out = op(queries, rings, layer, region, window=window)
        return out, (rings, out)

    return Case(
        op="window_attention",
        about=about(model, shape, dtype, rows=rows, window=window, width=width),
        run=functools.partial(run, window_read),
        reference=functools.partial(run, window_read_reference),
        pool=pool,
        layer_bytes=layer_bytes,
        operands=(region,),
        total_bytes=layer_bytes,
    )


def window_prefill_cases() -> Iterator[Case]:
    """A prompt's chunk after 4096 tokens, with the heads and windows of two models."""
    for model, shape, window in (
        ("gpt-oss-20b", AttentionShape(64, 8, 64), 128),
        ("gemma-4-26b-a4b", AttentionShape(16, 8, 256), 1024),
    ):
        yield _window_prefill_case(model, shape, window, length=2048, context=4096)


def _window_prefill_case(model, shape, window, length, context):
    dtype, heads = jnp.dtype("bfloat16"), (shape.kv_heads, shape.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    new = jax.random.normal(keys[0], (2, length, *heads), dtype)
    one, zero = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
    chunks = PrefillRegion(one, context * one, jnp.asarray([0, length], jnp.int32), zero)
    position_bytes = 2 * math.prod(heads) * dtype.itemsize

    def pool(layers):
        """The rings, and the queries: a call's output, so that the calls follow each other."""
        shapes = (layers, 2, ring_length(window, 4), 2, *heads), (length, shape.heads, heads[1])
        return tuple(map(functools.partial(jax.random.normal, dtype=dtype), keys[1:], shapes))

    def run(op, pool, layer, new, chunks):
        rings, queries = pool
        out, rings = op(queries, *new, rings, layer, chunks, window=window)
        return out, (rings, out)

    sizes = {"seqs": 1, "length": length, "context": context, "window": window}
    return Case(
        op="window_prefill",
        about=about(model, shape, dtype, **sizes),
        run=functools.partial(run, window_prefill),
        reference=functools.partial(run, window_prefill_reference),
        pool=pool,
        layer_bytes=window * position_bytes,
        operands=(new, chunks),
        total_bytes=(length + 2 * window) * position_bytes
        + 2 * length * shape.heads * shape.head_dim * dtype.itemsize,
        calls=FEW,
        flops=4 * shape.heads * shape.head_dim * length * window,
    )


def _paged_attention_case(model, rows, context, width, page_size=PAGE_SIZE, dtype="bfloat16"):
    rng, shape, dtype = np.random.default_rng(0), SHAPES[model], jnp.dtype(dtype)
    pages = rows * context // page_size
    tables = page_tables(rng, rows, pages)
    slots = _int32(1 + rng.permutation(rows))
    region = newest_tokens(slots, context, width)
    page = (page_size, shape.kv_heads, shape.head_dim)
    layer_bytes = 2 * rows * context * shape.kv_heads * shape.head_dim * dtype.itemsize

    def pool(layers):
        """The pool, and the queries: a call's output, so that the calls follow each other."""
        keys = jax.random.split(jax.random.key(0))
        queries = (rows, width, shape.heads, shape.head_dim)
        kv = (layers, 2, 1 + pages, *page)
        wide = jnp.bfloat16 if dtype.itemsize == 1 else dtype
        kv, queries = map(functools.partial(jax.random.normal, dtype=wide), keys, (kv, queries))
        return kv.astype(dtype), queries

    def run(op, pool, layer, tables, region):
        kv, queries = pool
        out = op(queries, kv, layer, tables, region)
        return out, (kv, out)

    return Case(
        op="paged_attention",
        about=about(
            model, shape, dtype, rows=rows, context=context, width=width, page_size=page_size
        ),
        run=functools.partial(run, paged_attention),
        reference=functools.partial(run, paged_attention_reference),
        pool=pool,
        layer_bytes=layer_bytes,
        operands=(tables, region),
        total_bytes=layer_bytes,
    )


def prefill_attention_cases() -> Iterator[Case]:
    """Chunks that begin their prompts, and chunks after 4096 tokens."""
    for model in ("qwen3.5-9b", "qwen3-8b"):
        for seqs, length in ((1, 8192), (8, 1024)):
            for context in (0, 4096):
                yield _prefill_attention_case(model, seqs, length, context)
    yield _prefill_attention_case("gemma-4-26b-a4b", 1, 2048, 4096)


def _prefill_attention_case(model, seqs, length, context):
    rng, shape = np.random.default_rng(0), SHAPES[model]
    pages = seqs * (context + length) // PAGE_SIZE
    tables = page_tables(rng, seqs, pages)
    slots = _int32(1 + rng.permutation(seqs))
    chunks = PrefillRegion(
        slots=slots,
        num_computed=jnp.full_like(slots, context),
        query_start=_int32(length * np.arange(seqs + 1)),
        state_offset=jnp.zeros_like(slots),  # only recurrent layers read it
    )
    tokens, heads, kv_heads, dim = seqs * length, shape.heads, shape.kv_heads, shape.head_dim
    kv_bytes = 2 * pages * PAGE_SIZE * kv_heads * dim * 2

    def pool(layers):
        """The pool, and the queries: a call's output, so that the calls follow each other."""
        keys, dtype = jax.random.split(jax.random.key(0)), jnp.bfloat16
        kv = jax.random.normal(keys[0], (layers, 2, 1 + pages, PAGE_SIZE, kv_heads, dim), dtype)
        return kv, jax.random.normal(keys[1], (tokens, heads, dim), dtype)

    def run(pool, layer, tables, chunks):
        kv, queries = pool
        out = prefill_attention(queries, kv, layer, tables, chunks)
        return out, (kv, out)

    sizes = {"seqs": seqs, "length": length, "context": context, "page_size": PAGE_SIZE}
    return Case(
        op="prefill_attention",
        about=about(model, shape, "bfloat16", **sizes),
        run=run,
        reference=None,
        pool=pool,
        layer_bytes=kv_bytes,
        operands=(tables, chunks),
        total_bytes=kv_bytes + 2 * tokens * heads * dim * 2,
        calls=FEW,
        flops=4 * heads * dim * seqs * length * (2 * context + length + 1) // 2,
    )


def newest_tokens(slots, context, width):
    """A region of rows that have `context` tokens, of which the last `width` are the step's."""
    unread = jnp.zeros_like(slots)  # only recurrent layers read it
    return DecodeRegion(
        slots=slots,
        num_computed=jnp.full_like(slots, context - width),
        query_len=jnp.full_like(slots, width),
        state_offset=unread,
        ring_length=unread,
    )


def page_tables(rng, rows, pages):
    """Page tables of slots `0..rows`, with all pages but the null page in random order."""
    tables = 1 + rng.permutation(pages).reshape(rows, -1)
    return _int32(np.concatenate((np.zeros_like(tables[:1]), tables)))


def _int32(values):
    return jnp.asarray(values, jnp.int32)
