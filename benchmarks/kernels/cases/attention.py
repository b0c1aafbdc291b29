"""The cases of what precedes attention; `kernel_cases.OPS` lists them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import INPUTS, Case, about
from benchmarks.measure.shapes import ATTENTION
from jaxspec.pallas.attention.inputs import attention_inputs, attention_inputs_reference

PAGE_SIZE = 16


def attention_inputs_cases() -> Iterator[Case]:
    """Tokens of a decode step of Qwen3.5-9B and of a prompt; the other models at one size."""
    for model in ("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b", "qwen3-8b"):
        for rows, width in ((64, 4), (64, 1), (8, 4), (1, 4), (1, 1), (8192, 1)):
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield _case(model, ATTENTION[model], jnp.dtype("bfloat16"), rows, width)
    yield _case("qwen3.5-9b", ATTENTION["qwen3.5-9b"], jnp.dtype("float32"), 64, 4)


def _case(model, shape, dtype, rows, width):
    """A prompt's tokens are rows of one."""
    tokens, gated, rng = rows * width, model.startswith("qwen3.5"), np.random.default_rng(0)
    half = shape.head_dim // (8 if gated else 2)
    columns = ((1 + gated) * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    keys = jax.random.split(jax.random.key(0), INPUTS)
    # Several, so that none is found in the cache.
    projections = tuple(jax.random.normal(key, (tokens, columns)).astype(dtype) for key in keys)
    angles = rng.normal(size=(tokens, half))
    angles = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    pages = 1 + -(-tokens // PAGE_SIZE)
    slots = PAGE_SIZE + rng.permutation((pages - 1) * PAGE_SIZE)[:tokens]

    def run(op, pool, layer, projections, norms, angles, slots):
        queries, pool = op(
            projections[layer % INPUTS], norms, angles, pool, layer, slots,
            heads=shape.heads, gated=gated, eps=1e-6, zero_centred=gated,
        )  # fmt: skip
        return queries, pool

    of_queries, of_pool = (
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
        layer_bytes=of_pool,
        operands=(
            projections,
            jnp.ones((2, shape.head_dim), dtype),
            angles,
            jnp.asarray(slots, jnp.int32),
        ),
        total_bytes=2 * (of_queries + of_pool + angles[0].nbytes) + 4 * tokens,
    )
