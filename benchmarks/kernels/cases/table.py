"""What `kernels.py` measures: the ops at the shapes of the published models.

To add an op, write a generator of `Case` and put it into `OPS`.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import FEW, MANY, Case, about, filled, live_rows
from benchmarks.kernels.cases.attention import attention_inputs_cases
from benchmarks.kernels.cases.conv import conv_update_cases, gdn_inputs_cases
from benchmarks.kernels.cases.matmul import (
    argmax_matmul_cases,
    gated_matmul_cases,
    gated_norm_matmul_cases,
    matmul_silu_cases,
    norm_matmul_cases,
    split_matmul_cases,
)
from benchmarks.kernels.cases.norm import add_norm_cases
from benchmarks.kernels.cases.prefill import (
    gdn_prefill_cases,
    mamba2_prefill_cases,
    mamba2_tokens,
    prefill_attention_cases,
)
from benchmarks.kernels.cases.replay import (
    gdn_conv_replay_cases,
    gdn_replay_cases,
    gdn_tokens,
    mamba2_replay_cases,
)
from benchmarks.measure.shapes import ATTENTION, GDN, MAMBA2
from jaxspec.pallas.attention.paged import paged_attention, paged_attention_reference
from jaxspec.pallas.gated_delta.step import gdn_step, gdn_step_reference
from jaxspec.pallas.mamba2.step import mamba2_step, mamba2_step_reference
from jaxspec.pallas.paging.slot_mapping import slot_mapping, slot_mapping_reference
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.pallas.recurrent.state_select_kernel import state_select_kernel


def gdn_step_cases() -> Iterator[Case]:
    """Sizes of the decode rectangle on Qwen3.5-9B's heads, and the other models at one size."""
    sizes = [("float32", rows, width) for width in (4, 1) for rows in (64, 256, 8, 1)]
    sizes += [("float32", 64, 8), ("float16", 64, 4)]
    sizes += [("bfloat16", rows, width) for width in (4, 1) for rows in (64, 256, 1)]
    for model, shape in GDN.items():
        for dtype, rows, width in sizes:
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield _gdn_step_case(model, shape, jnp.dtype(dtype), rows, width)


def _gdn_step_case(model, shape, dtype, rows, width):
    rng = np.random.default_rng(0)
    tokens = gdn_tokens(rng, shape, rows, width)
    slots = 1 + rng.permutation(rows).astype(np.int32)
    offset = rng.integers(0, width, size=rows).astype(np.int32)
    length = np.full(rows, width, np.int32)
    operands = (*tokens, slots, offset, length)
    state = (shape.value_heads, shape.value_dim, shape.key_dim)

    def pool(layers):
        # Every slot holds the same random state: the speed does not depend on which.
        one = jax.random.normal(jax.random.key(0), state, jnp.float32).astype(dtype)
        return jnp.broadcast_to(one, (layers, 1 + rows, width, *state)) + jnp.zeros((), dtype)

    def run(op, pool, layer, q, k, v, g, beta, *index):
        return op(q, k, v, g, beta, pool, layer, *index)

    state_bytes = rows * math.prod(state) * dtype.itemsize
    return Case(
        op="gdn_step",
        about=about(model, shape, dtype, rows=rows, width=width),
        run=functools.partial(run, gdn_step),
        reference=functools.partial(run, gdn_step_reference),
        pool=pool,
        layer_bytes=state_bytes * width,
        operands=tuple(jnp.asarray(x) for x in operands),
        total_bytes=state_bytes * (1 + width) + sum(x.nbytes for x in operands) + tokens[2].nbytes,
    )


def mamba2_step_cases() -> Iterator[Case]:
    """Sizes of the decode rectangle for Nemotron-3-Nano, and Nemotron-H-8B at one size."""
    sizes = [("float32", rows, width) for width in (4, 1) for rows in (64, 256, 8, 1)]
    sizes += [("float32", 64, 8), ("float16", 64, 4), ("float16", 64, 1)]
    for dtype, rows, width in sizes:
        yield _mamba2_step_case("nemotron-3-nano", jnp.dtype(dtype), rows, width)
    yield _mamba2_step_case("nemotron-h-8b", jnp.dtype("float32"), 64, 4)


def _mamba2_step_case(model, dtype, rows, width):
    shape = MAMBA2[model]
    operands = *mamba2_tokens(shape, rows, width), *live_rows(rows, width)
    state = (shape.heads, shape.head_dim, shape.state_dim)

    def run(op, pool, layer, x, dt, a, b, c, d, *index):
        return op(x, dt, a, b, c, d, pool, layer, *index)

    state_bytes = rows * math.prod(state) * dtype.itemsize
    return Case(
        op="mamba2_step",
        about=about(model, shape, dtype, rows=rows, width=width),
        run=functools.partial(run, mamba2_step),
        reference=functools.partial(run, mamba2_step_reference),
        pool=lambda layers: filled(layers, rows, width, *state, dtype=dtype),
        layer_bytes=state_bytes * width,
        operands=operands,
        total_bytes=state_bytes * (1 + width)
        + sum(y.nbytes for y in operands)
        + 4 * operands[0].size,
    )


def state_select_cases() -> Iterator[Case]:
    """The kernel, whatever the op runs."""
    for model, shape in GDN.items():
        for dtype, rows in (("float32", 64), ("bfloat16", 64), ("float32", 1)):
            yield _state_select_case(model, shape, jnp.dtype(dtype), rows)


def _state_select_case(model, shape, dtype, rows, candidates=4):
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    state_bytes = rows * math.prod(state) * dtype.itemsize

    def pool(layers):
        one = jax.random.normal(jax.random.key(0), state, jnp.float32).astype(dtype)
        return jnp.broadcast_to(one, (layers, 1 + rows, candidates, *state)) + jnp.zeros((), dtype)

    def kernel(pool, layer, *index):
        return state_select_kernel(pool, jnp.int32(layer), *index), pool

    return Case(
        op="state_select",
        about=about(model, shape, dtype, rows=rows),
        run=kernel,
        reference=lambda pool, *args: (state_select_reference(pool, *args), pool),
        pool=pool,
        layer_bytes=state_bytes,
        operands=live_rows(rows, candidates)[:2],
        total_bytes=2 * state_bytes,
        calls=FEW if rows > 1 else MANY,
        writes=False,
    )


def slot_mapping_cases() -> Iterator[Case]:
    """Latency: each call takes the slots of the one before for positions."""
    for rows, width in ((1, 4), (64, 4), (256, 8)):
        yield _slot_mapping_case(rows, width)


def _slot_mapping_case(rows, width, pages=2048, page_size=16):
    rng = np.random.default_rng(0)
    tables = jnp.asarray(rng.integers(1, 2**20, (1 + rows, pages)), jnp.int32)
    slots = jnp.repeat(live_rows(rows, width)[0], width)

    def run(op, positions, layer, tables, slots, live):
        # A barrier, or XLA would make one program of its several.
        out = jax.lax.optimization_barrier(op(tables, slots, positions, live, page_size=page_size))
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
    for model, shape in ATTENTION.items():
        yield _paged_attention_case(model, shape, 64, 4096, 4)
        if model in ("qwen3-8b", "qwen3.5-9b"):
            for rows, context, width in ((1, 32768, 4), (8, 4096, 4), (64, 4096, 1)):
                yield _paged_attention_case(model, shape, rows, context, width)
        if model == "qwen3-8b":
            yield _paged_attention_case(model, shape, 64, 4096, 4, page_size=64)
        if model in ("qwen3-8b", "qwen3.5-9b"):
            for rows, context in ((64, 4096), (1, 32768)):
                yield _paged_attention_case(model, shape, rows, context, 4, dtype="float8_e4m3fn")
        if model == "qwen3.5-9b":
            yield _paged_attention_case(model, shape, 64, 4096, 4, dtype="float32")


def _paged_attention_case(model, shape, rows, context, width, page_size=16, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    pages = rows * context // page_size
    tables = 1 + rng.permutation(pages).reshape(rows, -1)
    tables = np.concatenate((np.zeros_like(tables[:1]), tables))
    slots = 1 + rng.permutation(rows)
    start, count = np.full(rows, context - width), np.full(rows, width)
    dtype = jnp.dtype(dtype)
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

    def run(op, pool, layer, *index):
        kv, queries = pool
        out = op(queries, kv, layer, *index)
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
        operands=tuple(jnp.asarray(x, jnp.int32) for x in (tables, slots, start, count)),
        total_bytes=layer_bytes,
    )


OPS = {
    "gdn_step": gdn_step_cases,
    "gdn_prefill": gdn_prefill_cases,
    "gdn_replay": gdn_replay_cases,
    "gdn_conv_replay": gdn_conv_replay_cases,
    "mamba2_step": mamba2_step_cases,
    "mamba2_replay": mamba2_replay_cases,
    "mamba2_prefill": mamba2_prefill_cases,
    "conv_update": conv_update_cases,
    "gdn_inputs": gdn_inputs_cases,
    "add_norm": add_norm_cases,
    "attention_inputs": attention_inputs_cases,
    "norm_matmul": norm_matmul_cases,
    "split_matmul": split_matmul_cases,
    "gated_matmul": gated_matmul_cases,
    "gated_norm_matmul": gated_norm_matmul_cases,
    "matmul_silu": matmul_silu_cases,
    "argmax_matmul": argmax_matmul_cases,
    "state_select": state_select_cases,
    "slot_mapping": slot_mapping_cases,
    "paged_attention": paged_attention_cases,
    "prefill_attention": prefill_attention_cases,
}
