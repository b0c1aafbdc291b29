"""The cases of attention over latents; `table.OPS` lists them."""

import functools
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
from jaxspec.regions import PrefillRegion

PAGE_SIZE, VALUE_DIM, FEATURES = 16, 512, 576
HEADS = {
    "deepseek-v3": 128,
    "deepseek-v3 of 8 devices": 16,
    "kimi-linear-48b": 32,
    "glm-4.7-flash": 20,
}


def latent_attention_cases() -> Iterator[Case]:
    """Plain steps and verification of many rows, and of one long row."""
    for model in HEADS:
        for rows, context, width in ((64, 8192, 1), (64, 8192, 4), (1, 32768, 4)):
            yield _latent_attention_case(model, rows, context, width)


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


def _latent_prefill_attention_case(model, length, context):
    rng, heads = np.random.default_rng(0), HEADS[model]
    pages = (context + length) // PAGE_SIZE
    tables, one = page_tables(rng, 1, pages), jnp.ones(1, jnp.int32)
    chunks = PrefillRegion(
        slots=one,
        num_computed=context * one,
        query_start=jnp.asarray([0, length], jnp.int32),
        state_offset=0 * one,  # only recurrent layers read it
    )
    ops = latent_prefill_attention, latent_prefill_attention_reference
    return _case(
        *(ops, model, (length,), pages, (tables, chunks)),
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
