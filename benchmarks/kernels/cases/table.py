"""What `kernels/run.py` measures: the ops at the shapes of the published models.

To add an op, write a generator of `Case` and put it into `OPS`.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import MANY, Case, about, live_rows
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
    prefill_attention_cases,
)
from benchmarks.kernels.cases.replay import (
    gdn_conv_replay_cases,
    gdn_replay_cases,
    mamba2_replay_cases,
)
from benchmarks.kernels.cases.step import gdn_step_cases, mamba2_step_cases, state_select_cases
from benchmarks.measure.shapes import ATTENTION
from jaxspec.pallas.attention.paged import paged_attention, paged_attention_reference
from jaxspec.pallas.paging.slot_mapping import slot_mapping, slot_mapping_reference


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
