"""Attention over a sliding window: the newest keys and values, in a ring of each slot."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.attention import window_pages
from jaxspec.pallas.attention.paged import softmax_factor, why_not_kernel
from jaxspec.pallas.attention.prefill import why_no_prefill_kernel
from jaxspec.pallas.attention.references import Sinks, in_tiles, masked_softmax
from jaxspec.pallas.attention.ring_tables import PAGE, in_pages, kept_length, why_no_pages
from jaxspec.pallas.paging.kv_write import KVScales, as_stored
from jaxspec.pallas.recurrent.conv_ring import past_rows, ring_place
from jaxspec.regions import DecodeRegion, PrefillRegion, TokenRegion, real_tokens

WindowPool = Float[Array, "layers slots ring 2 kv_heads head_dim"]  # axis 3: keys, values

_UNIT = 64  # queries per tile of a prefill are a multiple
_MOST_TILE = 512
_MOST_READ = 2**26  # bytes of keys and values, in their pool's dtype, that a scan reads at once

_Decoded = Float[Array, "rows width heads head_dim"]
_Prefilled = Float[Array, "tokens heads head_dim"]


def window_attention(
    queries: _Decoded,
    keys: Float[Array, "rows width kv_heads head_dim"],
    values: Float[Array, "rows width kv_heads head_dim"],
    pool: WindowPool,
    layer: int,
    rows: DecodeRegion,
    *,
    window: int,
    scales: KVScales | None = None,
    sinks: Sinks | None = None,
) -> tuple[_Decoded, WindowPool]:
    """Write the rectangle's keys and values, and attend to the `window` newest positions.

    As `paged_attention`, but the token at position p attends to positions p - `window` + 1 to p,
    its own included. Keys and values of position p are in row p modulo the ring's length, so those
    of a rejected draft are overwritten by the next token at its position. With a window of 4, and a
    ring of 6 rows for 3 tokens per row, of which 1 is accepted:

        row           0   1   2   3   4   5
        before       p6  p7   .  p3  p4  p5   8 computed: the tokens see p5 to p7 and their own
        after        p6  p7  t8  d9 d10  p5
        next        p12  p7  t8 t9' d10' d11' ... the token at 9 sees p6 to p8

    XLA writes them; see `window_read` for the kernel.

    Raises:
        ValueError: the ring is too short for the tokens of a row.
    """
    num_rows, width, heads, head_dim = queries.shape
    _, num_slots, ring, _, kv_heads, _ = pool.shape
    history = window - 1
    if ring < history + width:
        raise ValueError(
            f"A ring must hold window - 1 + width = {history + width} positions, got {ring}. "
            f"Allocate the pool with num_drafts >= {width - 1}."
        )
    is_live = rows.is_live(num_slots)
    is_real = is_live[:, None] & real_tokens(rows.query_len, width)
    target = jnp.where(is_real, rows.slots[:, None], num_slots)
    ahead = jnp.arange(width, dtype=jnp.int32)[None, :]
    ring_rows = (ring_place(rows.num_computed, ring)[:, None] + ahead) % ring
    new = jnp.stack(as_stored(keys, values, scales, pool.dtype), axis=2)
    pool = pool.at[layer, target, ring_rows].set(new, mode="drop")
    read = functools.partial(window_read, window=window, scales=scales, sinks=sinks)
    return read(queries, pool, layer, rows), pool


def window_read(
    queries: _Decoded,
    pool: WindowPool,
    layer: int,
    rows: DecodeRegion,
    *,
    window: int,
    scales: KVScales | None = None,
    sinks: Sinks | None = None,
) -> _Decoded:
    """Attend as `window_attention`, to keys and values that are in the ring already.

    The kernel is that of `paged_attention`, for rings of whole pages (`ring_tables`). With 8-bit
    rings it does not protect earlier tokens from a draft that is NaN.
    """
    num_rows, width, *_ = queries.shape
    _, num_slots, ring, *_ = pool.shape
    why = why_no_pages(ring, window, width) or why_not_kernel(queries, pool, PAGE, scales)
    if dispatch.runs_kernel("window_attention", why, rows=num_rows):
        from jaxspec.pallas.attention.paged_kernel import paged_attention_kernel

        tables, region = in_pages(rows, num_slots, ring, window, width)
        operands = dispatch.layer_index(pool, layer), tables, region, None, scales, sinks
        return paged_attention_kernel(queries, pool, *operands, window=window)
    return window_read_reference(
        queries, pool, layer, rows, window=window, scales=scales, sinks=sinks
    )


def window_read_reference(queries, pool, layer, rows, *, window, scales=None, sinks=None):
    width, history = queries.shape[1], window - 1
    _, num_slots, ring, *_ = pool.shape
    is_live = rows.is_live(num_slots)
    is_real = is_live[:, None] & real_tokens(rows.query_len, width)
    context = jnp.arange(-history, width, dtype=jnp.int32)  # relative to the row's first token
    ring_rows = (ring_place(rows.num_computed, ring)[:, None] + context[None, :]) % ring
    slot = jnp.clip(rows.slots, 0, num_slots - 1)
    seen = pool[layer, slot[:, None], ring_rows]
    has_position = context[None, :] >= -rows.num_computed[:, None]
    written = has_position & (context[None, :] < rows.query_len[:, None]) & is_live[:, None]
    sees = written[:, None, :] & is_real[:, :, None] & _band(width, window)[None]
    is_draft = (context > 0)[None, :, None, None]
    values = seen[:, :, 1].astype(jnp.float32)
    values = jnp.where(written[:, :, None, None] & (~is_draft | jnp.isfinite(values)), values, 0.0)
    return _attend(queries, seen[:, :, 0], values, sees, scales, sinks)


def window_scan(
    queries: _Prefilled,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    pool: WindowPool,
    layer: int,
    rows: TokenRegion,
    *,
    window: int,
    scales: KVScales | None = None,
    sinks: Sinks | None = None,
) -> tuple[_Prefilled, WindowPool]:
    """`window_attention` of each token by itself, however many tokens a slot has.

    A token reads earlier ones of its slot in the region, or else in the ring, which gets the last
    keys and values of each slot, as many as it holds.
    """
    num_tokens = queries.shape[0]
    if not num_tokens:
        return queries, pool
    _, num_slots, ring, *_ = pool.shape
    is_live = rows.is_live(num_slots)
    slot = jnp.clip(rows.slots, 0, num_slots - 1)
    new = jnp.stack(as_stored(keys, values, scales, pool.dtype), axis=1)
    ago = jnp.arange(window - 1, -1, -1, dtype=jnp.int32)[None, :]

    def attend(tokens):
        position = rows.num_computed[tokens][:, None] - ago
        source = tokens[:, None] - ago
        held = pool[layer, slot[tokens][:, None], position % ring]
        is_new = source >= rows.first[tokens][:, None]
        seen = jnp.where(is_new[..., None, None, None], new[jnp.maximum(source, 0)], held)
        written = (position >= 0) & is_live[tokens][:, None]
        values = jnp.where(written[..., None, None], seen[:, :, 1].astype(jnp.float32), 0.0)
        sees = written[:, None, :]
        out = _attend(queries[tokens][:, None], seen[:, :, 0], values, sees, scales, sinks)
        return out[:, 0], held[:, -1]

    token_bytes = window * math.prod(pool.shape[3:]) * pool.dtype.itemsize
    size = math.gcd(num_tokens, 2 ** max(0, (_MOST_READ // token_bytes).bit_length() - 1))
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)

    def attend_some(index, found):
        some = attend(lax.dynamic_slice_in_dim(tokens, index * size, size))
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=index * size, axis=0)
        return jax.tree.map(put, found, some)

    count = jnp.max(jnp.where(is_live, tokens + 1, 0))
    found = jnp.zeros_like(queries), jnp.zeros_like(new)
    out, old = lax.fori_loop(0, (count + size - 1) // size, attend_some, found)
    left = rows.end - tokens
    is_stored = is_live & (left <= ring)
    target = jnp.where(is_stored, rows.slots, num_slots)
    place = ring_place(rows.num_computed, ring)
    # Values to write depend on values that were read: without this order XLA copies the pool.
    stored = jnp.where(is_stored[:, None, None, None], new, old)
    return out, pool.at[layer, target, place].set(stored, mode="drop")


def window_prefill(
    queries: _Prefilled,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    pool: WindowPool,
    layer: int,
    chunks: PrefillRegion,
    *,
    window: int,
    scales: KVScales | None = None,
    sinks: Sinks | None = None,
) -> tuple[_Prefilled, WindowPool]:
    """`window_attention` for flat prompt chunks, of any length.

    A chunk attends to its own keys and values, and to those before it in the ring, which then holds
    the newest, as many as `kept_length`, with zeros before the first position. Its memory does not
    grow with the prompt. The output of padding is 0.

    The kernel is that of `prefill_attention`, over pages that XLA gathers (`WindowPages`). XLA
    writes the ring.
    """
    rows = min(len(queries), len(chunks.slots))  # without tokens or chunks there is no work
    why = why_no_pages(pool.shape[2], window, 1)
    why = why or why_no_prefill_kernel(queries, pool, window_pages.PAGE, scales)
    if dispatch.runs_kernel("window_prefill", why, rows=rows):
        from jaxspec.pallas.attention.prefill_kernel import prefill_attention_kernel

        kept, new = kept_length(window), jnp.stack(as_stored(keys, values, scales, pool.dtype))
        pages = window_pages.WindowPages.of(new, pool, layer, chunks, kept)
        operands = pages.kv, jnp.int32(0), pages.tables, pages.chunks, scales, sinks
        out = prefill_attention_kernel(queries, *operands, window=window)
        return out, _with_newest(pool, layer, chunks, pages.newest(kept))
    operands = queries, keys, values, pool, layer, chunks
    return window_prefill_reference(*operands, window=window, scales=scales, sinks=sinks)


def window_prefill_reference(
    queries, keys, values, pool, layer, chunks, *, window, scales=None, sinks=None
):
    """Reference for `window_prefill`, tile by tile so that only real tokens take time."""
    num_tokens, num_seqs = queries.shape[0], chunks.slots.shape[0]
    if not num_tokens or not num_seqs:
        return jnp.zeros_like(queries), pool
    _, num_slots, ring, *_ = pool.shape
    history, computed = window - 1, chunks.num_computed
    is_live = chunks.is_live(num_slots)
    slot = jnp.clip(chunks.slots, 0, num_slots - 1)
    kept = min(kept_length(window), ring)
    past = pool[layer, slot[:, None], past_rows(computed, kept, ring)]
    new = jnp.stack(as_stored(keys, values, scales, pool.dtype), axis=1)

    def at(
        seq: Int[Array, "..."], offset: Int[Array, "... n"]
    ) -> Float[Array, "... n 2 heads dim"]:
        """Return keys and values at offsets in chunks; zeros before the first position."""
        seq = seq[..., None]
        own = new[jnp.clip(chunks.query_start[seq] + offset, 0, num_tokens - 1)]
        earlier = past[seq, jnp.clip(kept + offset, 0, kept - 1)]
        found = jnp.where((offset >= 0)[..., None, None, None], own, earlier)
        is_there = computed[seq] + offset >= 0
        return jnp.where(is_there[..., None, None, None], found, jnp.zeros((), found.dtype))

    tile = min(_MOST_TILE, -(-window // _UNIT) * _UNIT)
    context = jnp.arange(-history, tile, dtype=jnp.int32)  # relative to the tile's first token

    def attend(tile_queries, seq, offset):
        position = offset + context
        seen = at(seq, position)
        written = (computed[seq] + position >= 0) & (position < chunks.query_len[seq])
        values = jnp.where(written[:, None, None], seen[:, 1].astype(jnp.float32), 0.0)
        sees = written[None, :] & _band(tile, window)
        return _attend(
            tile_queries[None], seen[None, :, 0], values[None], sees[None], scales, sinks
        )[0]

    scores = tile * queries.shape[1] * len(context)
    out = in_tiles(queries, chunks, is_live, attend, tile=tile, scores=scores)

    every = jnp.arange(num_seqs, dtype=jnp.int32)
    ago = jnp.arange(-kept, 0, dtype=jnp.int32)[None, :]
    newest = at(every, chunks.query_len[:, None] + ago)
    return out, _with_newest(pool, layer, chunks, newest)


def _with_newest(pool, layer, chunks, newest):
    """Write each chunk's newest keys and values to its ring."""
    _, num_slots, ring, *_ = pool.shape
    target = jnp.where(chunks.is_live(num_slots), chunks.slots, num_slots)
    place = ring_place(chunks.num_computed, ring) + chunks.query_len
    ring_rows = past_rows(place, newest.shape[1], ring)
    return pool.at[layer, target[:, None], ring_rows].set(newest, mode="drop")


def _band(tokens: int, window: int) -> Array:
    """Return which of `window` - 1 + `tokens` consecutive positions each of the last ones sees."""
    ahead = jnp.arange(window - 1 + tokens)[None, :] - jnp.arange(tokens)[:, None]
    return (ahead >= 0) & (ahead < window)


def _attend(queries, keys, values, sees, scales, sinks):
    """Attention of `[rows, tokens]` queries to `[rows, context]` keys where `sees` is True."""
    rows, tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(rows, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "rtkgd,rckd->rkgtc",
        grouped,
        keys.astype(queries.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    scores = scores * softmax_factor(head_dim, scales)
    weights = masked_softmax(jnp.where(sees[:, None, None], scores, -jnp.inf), sinks)
    out = jnp.einsum("rkgtc,rckd->rtkgd", weights, values, precision="highest")
    out = out if scales is None else out * scales[1]
    return out.reshape(queries.shape).astype(queries.dtype)
