"""The cases of attention over latents; `table.OPS` lists them."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import FEW, Case
from benchmarks.kernels.cases.attention import newest_tokens, page_tables
from jaxspec.pallas.attention.latent import (
    latent_attention,
    latent_attention_reference,
    latent_prefill_attention,
    latent_prefill_attention_reference,
)
from jaxspec.pallas.attention.token_index import TokenIndex
from jaxspec.regions import PrefillRegion

PAGE_SIZE, VALUE_DIM, FEATURES = 16, 512, 576
TOP_K, INDEX_HEADS, INDEX_DIM = 2048, 64, 128  # of the token index of DeepSeek-V3.2
HEADS = {
    "deepseek-v3": 128,
    "deepseek-v3 of 8 devices": 16,
    "kimi-linear-48b": 32,
    "glm-4.7-flash": 20,
}
INDEXED = {"deepseek-v3.2": 128, "deepseek-v3.2 of 8 devices": 16}


def latent_attention_cases() -> Iterator[Case]:
    """Plain steps and verification of many rows, and of one long row; with an index of many.

    In the last case the index selects all tokens, which depends on the rows.
    """
    for model in HEADS:
        for rows, context, width in ((64, 8192, 1), (64, 8192, 4), (1, 32768, 4)):
            yield _latent_attention_case(model, rows, context, width)
    for model in INDEXED:
        for context, width in ((8192, 1), (8192, 4), (1024, 4)):
            yield _selected_rows_case(model, 64, context, width, 8192)


def _selected_rows_case(model, rows, context, width, most):
    """Rows of `context` tokens, in page tables of `most`."""
    rng, tokens = np.random.default_rng(0), rows * width
    pages = rows * most // PAGE_SIZE
    slots = jnp.asarray(1 + rng.permutation(rows), jnp.int32)
    operands = page_tables(rng, rows, pages), newest_tokens(slots, context, width)
    ops = latent_attention, latent_attention_reference
    seen = min(context, TOP_K)
    return _selected_case(
        *(ops, model, (rows, width), pages, operands),
        {"rows": rows, "context": context, "width": width, "table": most},
        vectors=rows * min(width * TOP_K, context),
        keys=rows * context if context > TOP_K else 0,
        pairs=tokens * seen,
        scores=tokens * context if context > TOP_K else 0,
    )


def _latent_attention_case(model, rows, context, width):
    rng, heads = np.random.default_rng(0), HEADS[model]
    pages = rows * context // PAGE_SIZE
    tables = page_tables(rng, rows, pages)
    slots = jnp.asarray(1 + rng.permutation(rows), jnp.int32)
    ops = latent_attention, latent_attention_reference
    return _case(
        *(ops, model, (rows, width), pages, (tables, newest_tokens(slots, context, width))),
        {"rows": rows, "context": context, "width": width},
        flops=2 * rows * width * heads * context * (FEATURES + VALUE_DIM),
    )


def latent_prefill_attention_cases() -> Iterator[Case]:
    """A chunk that begins a prompt, and one after 4096 tokens."""
    for model in ("kimi-linear-48b", "glm-4.7-flash"):
        for context in (0, 4096):
            yield _latent_prefill_attention_case(model, 2048, context)
    for model in INDEXED:
        yield _selected_prompt_case(model, 2048, 4096)


def _selected_prompt_case(model, length, context):
    ops = latent_prefill_attention, latent_prefill_attention_reference
    pages = (context + length) // PAGE_SIZE
    return _selected_case(
        *(ops, model, (length,), pages, _one_chunk(pages, length, context)),
        {"length": length, "context": context},
        vectors=context + length,
        keys=context + length,
        pairs=length * TOP_K,
        scores=length * (context + length // 2),
    )


def _one_chunk(pages, length, context):
    """The page tables and the region of a chunk of `length` tokens after `context`."""
    one = jnp.ones(1, jnp.int32)
    return page_tables(np.random.default_rng(0), 1, pages), PrefillRegion(
        slots=one,
        num_computed=context * one,
        query_start=jnp.asarray([0, length], jnp.int32),
        state_offset=0 * one,  # only recurrent layers read it
    )


def _latent_prefill_attention_case(model, length, context):
    pages, heads = (context + length) // PAGE_SIZE, HEADS[model]
    ops = latent_prefill_attention, latent_prefill_attention_reference
    return _case(
        *(ops, model, (length,), pages, _one_chunk(pages, length, context)),
        {"length": length, "context": context},
        more_bytes=2 * length * heads * (FEATURES + VALUE_DIM),
        calls=FEW,
        flops=2 * length * heads * (context + length // 2) * (FEATURES + VALUE_DIM),
    )


def _case(ops, model, sizes, pages, operands, about, *, flops, more_bytes=0, calls=None):
    """The case of an op and its reference, with queries `[*sizes, heads, FEATURES]`."""
    op, reference = ops
    layer_bytes = 2 * pages * PAGE_SIZE * FEATURES

    def pool(layers):
        """The pool, and the queries; a call's output becomes a part of the next one's."""
        keys, dtype = jax.random.split(jax.random.key(0)), jnp.bfloat16
        latents = jax.random.normal(keys[0], (layers, 1 + pages, PAGE_SIZE, FEATURES), dtype)
        return latents, jax.random.normal(keys[1], (*sizes, HEADS[model], FEATURES), dtype)

    def run(op, pool, layer, *operands):
        latents, queries = pool
        out = op(queries, latents, layer, *operands, value_dim=VALUE_DIM, scale=FEATURES**-0.5)
        return out, (latents, queries.at[..., :VALUE_DIM].set(out))

    heads = f"{HEADS[model]} x {FEATURES}"
    return Case(
        op=op.__name__,
        about={"model": model, "heads": heads, "dtype": "bfloat16", **about},
        run=functools.partial(run, op),
        reference=functools.partial(run, reference),
        pool=pool,
        layer_bytes=layer_bytes,
        operands=operands,
        total_bytes=layer_bytes + more_bytes,
        calls=calls,
        flops=flops,
    )


def _selected_case(ops, model, sizes, pages, operands, about, *, vectors, keys, pairs, scores):
    """The case of an op with an index over queries `[*sizes, heads, FEATURES]`.

    Args:
        vectors: Vectors that must be read.
        keys: Keys of the index that must be read.
        pairs: Tokens and vectors that they attend to.
        scores: Tokens and keys of the index that are compared.
    """
    op, reference = ops
    heads, dtype = INDEXED[model], jnp.bfloat16
    layer_bytes = 2 * (vectors * FEATURES + keys * INDEX_DIM)
    seeds = jax.random.split(jax.random.key(0), 5)
    of_index = (
        jax.random.normal(seeds[0], (*sizes, INDEX_HEADS, INDEX_DIM), dtype),
        jax.random.normal(seeds[1], (*sizes, INDEX_HEADS)),
    )

    def pool(layers):
        """Both pools, and the queries; a call's output becomes a part of the next one's."""
        lead = layers, 1 + pages, PAGE_SIZE
        latents = jax.random.normal(seeds[2], (*lead, FEATURES), dtype)
        index_keys = jax.random.normal(seeds[3], (*lead, INDEX_DIM), dtype)
        return latents, index_keys, jax.random.normal(seeds[4], (*sizes, heads, FEATURES), dtype)

    def run(op, pool, layer, of_index, *operands):
        latents, index_keys, queries = pool
        index = TokenIndex(of_index[0], of_index[1], index_keys, TOP_K)
        options = {"value_dim": VALUE_DIM, "scale": FEATURES**-0.5, "index": index}
        out = op(queries, latents, layer, *operands, **options)
        return out, (latents, index_keys, queries.at[..., :VALUE_DIM].set(out))

    described = {"heads": f"{heads} x {FEATURES}", "dtype": "bfloat16", "top_k": TOP_K}
    tokens = math.prod(sizes)
    return Case(
        op=op.__name__,
        about={"model": model, **described, **about},
        run=functools.partial(run, op),
        reference=functools.partial(run, reference),
        pool=pool,
        layer_bytes=layer_bytes,
        operands=(of_index, *operands),
        total_bytes=layer_bytes + 2 * tokens * heads * (FEATURES + VALUE_DIM),
        calls=FEW,
        flops=2 * (pairs * heads * (FEATURES + VALUE_DIM) + scores * INDEX_HEADS * INDEX_DIM),
    )
