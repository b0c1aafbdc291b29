"""Prefill attention: flat prompt chunks, each over its earlier context and itself."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.chunk_rows import attend_by_rows
from jaxspec.pallas.attention.paged import (
    WIDE,
    softmax_factor,
    why_not_page_size,
    why_not_wide_kernel,
)
from jaxspec.pallas.attention.references import Sinks, in_tiles, masked_softmax
from jaxspec.pallas.paging.kv_write import KVPool, KVScales
from jaxspec.regions import PrefillRegion

_TILE = 64  # queries per tile of the reference


def prefill_attention(
    queries: Float[Array, "tokens heads head_dim"],
    kv: KVPool,
    layer: int,
    page_tables: Int[Array, "slots pages"],
    chunks: PrefillRegion,
    scales: KVScales | None = None,
    sinks: Sinks | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of every token over its own sequence, in the queries' dtype.

    Token `j` of a chunk is at position `chunks.num_computed + j` and attends to positions `0` up to
    its own in the pages of the chunk's slot, where `kv_write` has already stored this step's keys
    and values, divided by `scales` if there are any. Query heads share keys in groups of
    `heads // kv_heads`; scores are multiplied by `head_dim ** -0.5`; scores and softmax are
    float32, with `sinks` if there are any (`masked_softmax`). The output of padding (tokens outside
    every chunk, and chunks that are not live) is 0.

    The kernel for heads of 512 computes rows of a few tokens, and a non-finite value at a later
    token of a row counts as 0 in it, as in `paged_attention`.
    """
    kv_heads, head_dim = kv.shape[4:]
    is_wide = head_dim == WIDE
    if is_wide:
        why = why_not_wide_kernel(queries, kv, scales, sinks)
    else:
        why = why_no_prefill_kernel(queries, kv, kv.shape[3], scales)
    rows = min(queries.shape[0], chunks.slots.shape[0])
    if dispatch.runs_kernel("prefill_attention", why, rows=rows):
        on_device = dispatch.layer_index(kv, layer)
        if not is_wide:
            from jaxspec.pallas.attention.prefill_kernel import prefill_attention_kernel

            operands = queries, kv, on_device, page_tables, chunks
            return prefill_attention_kernel(*operands, scales, sinks)
        from jaxspec.pallas.attention.wide_kernel import wide_attention_kernel

        def attend(queries, rows):
            return wide_attention_kernel(queries, kv, on_device, page_tables, rows)

        group = queries.shape[1] // kv_heads
        return attend_by_rows(attend, queries, chunks, page_tables.shape[0], group)
    return prefill_attention_reference(queries, kv, layer, page_tables, chunks, scales, sinks)


def prefill_attention_reference(queries, kv, layer, page_tables, chunks, scales=None, sinks=None):
    """Reference for `prefill_attention`, tile by tile so that only real tokens take time."""
    if not chunks.slots.shape[0]:  # no chunk has tokens
        return jnp.zeros_like(queries)
    is_live = chunks.is_live(page_tables.shape[0])

    def attend(tile_queries, seq, offset):
        pages, position = page_tables[chunks.slots[seq]], chunks.num_computed[seq] + offset
        remaining = jnp.where(is_live[seq], chunks.query_len[seq], 0) - offset
        return _attend(tile_queries, kv, layer, pages, position, remaining, scales, sinks)

    scores = _TILE * queries.shape[1] * page_tables.shape[1] * kv.shape[3]
    return in_tiles(queries, chunks, is_live, attend, tile=_TILE, scores=scores)


def _attend(queries, kv, layer, pages, position, num_real, scales, sinks):
    """Attention of consecutive tokens, the first at `position`, over one row of the page table."""
    tokens, heads, head_dim = queries.shape
    _, _, num_pages, page_size, kv_heads, _ = kv.shape
    context = pages.shape[0] * page_size
    pages = jnp.clip(pages, 0, num_pages - 1)
    keys = kv[layer, 0, pages].reshape(context, kv_heads, head_dim)
    values = kv[layer, 1, pages].reshape(context, kv_heads, head_dim)

    key_position = jnp.arange(context, dtype=jnp.int32)
    query_position = position + jnp.arange(tokens, dtype=jnp.int32)
    grouped = queries.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "tkgd,ckd->kgtc",
        grouped,
        keys.astype(queries.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    sees = (key_position[None, :] <= query_position[:, None])[None, None]
    scores = scores * softmax_factor(head_dim, scales)
    weights = masked_softmax(jnp.where(sees, scores, -jnp.inf), sinks)
    # Pages beyond the sequence may hold non-finite values of an earlier request.
    written = key_position < position + num_real
    values = jnp.where(written[:, None, None], values.astype(jnp.float32), 0.0)
    out = jnp.einsum("kgtc,ckd->tkgd", weights, values, precision="highest")
    out = out if scales is None else out * scales[1]
    return out.reshape(queries.shape).astype(queries.dtype)


def why_no_prefill_kernel(queries, kv, page_size, scales):
    """Return the reason why the kernel does not take these operands; None if it does.

    `kv` is a `KVPool` or a `WindowPool`, whose last axes are the same.
    """
    kv_heads, head_dim = kv.shape[4:]
    group = queries.shape[1] // kv_heads
    if queries.dtype != jnp.bfloat16 or kv.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        given = f"queries in {queries.dtype} over {kv.dtype}"
        return f"{given}, not bfloat16 over bfloat16 or float8_e4m3fn"
    if scales is not None and kv.dtype != jnp.float8_e4m3fn:
        return f"scaled keys and values in {kv.dtype}"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim}, not 64, 128 or 256"
    if (why := why_not_page_size(page_size)) is not None:
        return why
    if group > (7 if group % 2 else 16):  # two warpgroups of 64 rows, at least 8 tokens per head
        return f"{group} heads to a key head, more than a tile of queries holds"
    return None
