"""Attention over latents: the vector of a token is the key of all heads, and its start the value.

DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1, with the up-projections of keys and
values applied to queries and outputs. So all heads read one vector per token.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import device
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.chunk_rows import attend_by_rows
from jaxspec.pallas.attention.paged import why_not_page_size
from jaxspec.pallas.attention.references import in_tiles, masked_softmax, over_longest_row
from jaxspec.pallas.attention.selected_tokens import (
    attend_to_selected,
    tokens_at_once,
    unless_all_are_selected,
)
from jaxspec.pallas.attention.token_index import TokenIndex, visible
from jaxspec.pallas.paging.kv_write import VectorPool
from jaxspec.regions import DecodeRegion, PrefillRegion, real_tokens

_TILE = 64  # queries per tile of the prefill reference


def latent_attention(
    queries: Float[Array, "rows width heads features"],
    latents: VectorPool,
    layer: int,
    page_tables: Int[Array, "slots pages"],
    rows: DecodeRegion,
    *,
    value_dim: int,
    scale: float,
    index: TokenIndex | None = None,
) -> Float[Array, "rows width heads value_dim"]:
    """Causal attention of each row's `width` newest tokens over its pages, in the queries' dtype.

    Rows, positions, padding and rejected drafts are as in `paged_attention`. `latents` holds one
    vector per token (`vector_write`): all of it is the key of every head, and its first `value_dim`
    features are the value. Scores are multiplied by `scale`; scores and softmax are float32. With
    an `index`, over `[rows, width]` tokens, each token attends to those that it selects; the kernel
    reads their vectors alone, which XLA gathers.
    """
    sizes = {"value_dim": value_dim, "scale": scale}
    why = _why_not_kernel(queries, latents, value_dim)
    if dispatch.runs_kernel("latent_attention", why, rows=queries.shape[0]):
        from jaxspec.pallas.attention.wide_kernel import latent_attention_kernel

        kernel = functools.partial(latent_attention_kernel, **sizes)
        return _attend_by_kernel(kernel, queries, latents, layer, page_tables, rows, index)

    def attend(tables):
        return latent_attention_reference(queries, latents, layer, tables, rows, index, **sizes)

    return over_longest_row(attend, page_tables, rows, latents.shape[2])


def latent_attention_reference(
    queries, latents, layer, page_tables, rows, index=None, *, value_dim, scale
):
    """Reference for `latent_attention`: gather every page of the row, mask, softmax."""
    pages, query_len = _pages_of(rows, page_tables)
    operands = queries, latents, layer, pages, rows.num_computed, query_len, index
    return _attend(*operands, value_dim, scale)


def _pages_of(rows, page_tables):
    """Return the pages of each row, and its tokens: none for padding."""
    num_slots = page_tables.shape[0]
    pages = page_tables[jnp.clip(rows.slots, 0, num_slots - 1)]
    return pages, jnp.where(rows.is_live(num_slots), rows.query_len, 0)


def _attend_by_kernel(kernel, queries, latents, layer, page_tables, rows, index):
    """Run `latent_attention` with its kernel, over all tokens or over the selected ones."""
    on_device = dispatch.layer_index(latents, layer)
    pages, query_len = _pages_of(rows, page_tables)

    def to_all():
        return kernel(queries, latents, on_device, page_tables, rows)

    def to_selected():
        assert index is not None
        newest = _newest(rows.num_computed, query_len, queries.shape[1])
        return attend_to_selected(kernel, queries, latents, layer, pages, newest, index)

    length, context = rows.num_computed + query_len, pages.shape[1] * latents.shape[2]
    length = jnp.where(query_len > 0, length, 0)
    return unless_all_are_selected(index, length, context, to_all, to_selected)


def latent_prefill_attention(
    queries: Float[Array, "tokens heads features"],
    latents: VectorPool,
    layer: int,
    page_tables: Int[Array, "slots pages"],
    chunks: PrefillRegion,
    *,
    value_dim: int,
    scale: float,
    index: TokenIndex | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """Causal attention of every token over its own sequence, in the queries' dtype.

    Chunks, positions and padding are as in `prefill_attention`, and all else as in
    `latent_attention`; an `index` is over the region's tokens.
    """
    sizes = {"value_dim": value_dim, "scale": scale}
    why = _why_not_kernel(queries, latents, value_dim)
    num_rows = min(queries.shape[0], chunks.slots.shape[0])
    if dispatch.runs_kernel("latent_prefill_attention", why, rows=num_rows):
        from jaxspec.pallas.attention.wide_kernel import latent_attention_kernel

        kernel = functools.partial(latent_attention_kernel, **sizes)
        return _prefill_by_kernel(kernel, queries, latents, layer, page_tables, chunks, index)
    operands = queries, latents, layer, page_tables, chunks, index
    return latent_prefill_attention_reference(*operands, **sizes)


def latent_prefill_attention_reference(
    queries, latents, layer, page_tables, chunks, index=None, *, value_dim, scale
):
    """Reference for `latent_prefill_attention`, tile by tile so that only real tokens take time."""
    num_tokens, heads = queries.shape[:2]
    if not chunks.slots.shape[0]:  # no chunk has tokens
        return jnp.zeros((num_tokens, heads, value_dim), queries.dtype)
    is_live = chunks.is_live(page_tables.shape[0])
    tokens = queries, None if index is None else (index.queries, index.weights)

    def attend(tile, seq, offset):
        own, of_index = jax.tree.map(lambda x: x[None], tile)
        select = None
        if index is not None:
            select = TokenIndex(of_index[0], of_index[1], index.keys, index.top_k)
        position, remaining = chunks.num_computed[seq] + offset, chunks.query_len[seq] - offset
        rows = page_tables[chunks.slots[seq]][None], position[None], remaining[None]
        return _attend(own, latents, layer, *rows, select, value_dim, scale)[0]

    scored = max(heads, 0 if index is None else index.queries.shape[1])
    scores = _TILE * scored * page_tables.shape[1] * latents.shape[2]
    return in_tiles(tokens, chunks, is_live, attend, tile=_TILE, scores=scores)


def _prefill_by_kernel(kernel, queries, latents, layer, page_tables, chunks, index):
    """Run `latent_prefill_attention` with the kernel of rows."""
    on_device = dispatch.layer_index(latents, layer)
    num_slots, heads = page_tables.shape[0], queries.shape[1]
    is_live = chunks.is_live(num_slots)

    def to_all():
        def attend(queries, rows):
            return kernel(queries, latents, on_device, page_tables, rows)

        return attend_by_rows(attend, queries, chunks, num_slots, heads)

    def to_selected():
        assert index is not None
        tile, tokens = tokens_at_once(latents, index), (queries, index.queries, index.weights)

        def attend(tokens, seq, offset):
            own, of_queries, weights = (x[None] for x in tokens)
            position, remaining = chunks.num_computed[seq] + offset, chunks.query_len[seq] - offset
            newest = _newest(position[None], remaining[None], tile)
            operands = own, latents, layer, page_tables[chunks.slots[seq]][None], newest
            select = TokenIndex(of_queries, weights, index.keys, index.top_k)
            return attend_to_selected(kernel, *operands, select)[0]

        return in_tiles(tokens, chunks, is_live, attend, tile=tile, scores=None)

    length = jnp.where(is_live, chunks.num_computed + chunks.query_len, 0)
    context = page_tables.shape[1] * latents.shape[2]
    return unless_all_are_selected(index, length, context, to_all, to_selected)


def _newest(position, num_real, width):
    """Return the last position visible to each of `width` tokens, -1 for padding.

    Row `r` has `num_real[r]` tokens from `position[r]` on.
    """
    newest = position[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.where(real_tokens(num_real, width), newest, -1)


def _attend(queries, latents, layer, pages, position, num_real, index, value_dim, scale):
    """Attention of rows of consecutive tokens, each over its row of the page table.

    Row `r` has `num_real[r]` tokens from `position[r]` on.
    """
    num_rows, width = queries.shape[:2]
    _, num_pages, page_size, features = latents.shape
    context = pages.shape[1] * page_size
    pages = jnp.clip(pages, 0, num_pages - 1)
    held = latents[layer, pages].reshape(num_rows, context, features)

    place = jnp.arange(context, dtype=jnp.int32)
    newest = _newest(position, num_real, width)
    sees = visible(newest, context)
    if index is not None:
        sees = index.selected(layer, pages, newest)

    scores = jnp.einsum(
        "rwhd,rcd->rhwc",
        queries,
        held.astype(queries.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    weights = masked_softmax(jnp.where(sees[:, None], scores * scale, -jnp.inf), None)
    # Pages beyond the row's length may hold non-finite values of an earlier request, and rejected
    # drafts after the row's first token may be non-finite.
    length = jnp.where(num_real > 0, position + num_real, 0)
    written = (place[None, :] < length[:, None])[:, :, None]
    is_later = (place[None, :] > position[:, None])[:, :, None]
    # A GPU multiplies weights and values in 16 bits, as kernels do. XLA's CPU backend has no such
    # product.
    is_cpu = device.default_device().platform == "cpu"
    dtype = jnp.dtype("float32") if is_cpu else queries.dtype
    values = held[:, :, :value_dim].astype(dtype)
    values = jnp.where(written & (~is_later | jnp.isfinite(values)), values, 0)
    out = jnp.einsum(
        "rhwc,rcd->rwhd",
        weights.astype(dtype),
        values,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return out.astype(queries.dtype)


def _why_not_kernel(queries, latents, value_dim):
    features, page_size = queries.shape[-1], latents.shape[2]
    if queries.dtype != jnp.bfloat16 or latents.dtype != jnp.bfloat16:
        return f"queries in {queries.dtype} over {latents.dtype}, not bfloat16"
    if value_dim not in (128, 256, 512) or features != value_dim + 64:
        return f"latents of {value_dim} and {features - value_dim} features"
    return why_not_page_size(page_size)
