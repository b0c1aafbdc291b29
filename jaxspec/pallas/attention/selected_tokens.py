"""Attention to the tokens that an index selects, gathered for kernels that attend to pages."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import row_tiles
from jaxspec.pallas.attention.token_index import TokenIndex, index_scores
from jaxspec.pallas.paging.kv_write import VectorPool
from jaxspec.regions import DecodeRegion

PAGE = 64
"""Positions per page of gathered vectors: a tile of the kernel, so a tile is one copy."""

_TILE = 64  # most tokens whose vectors are gathered at once in a prompt
_GATHERED = 2**28  # most bytes of their vectors
_GATHERED_OF_ROWS = 2**30  # the same for rows that decode

_Attend = Callable[[Array, VectorPool, Array, Array, DecodeRegion], Array]


def unless_all_are_selected(
    index: TokenIndex | None,
    length: Int[Array, " rows"],
    context: int,
    attend_to_all: Callable[[], Array],
    attend_to_selected: Callable[[], Array],
) -> Array:
    """Return the result of `attend_to_all` if the index, if any, selects all tokens of all rows.

    That depends on the rows' lengths, so it is decided in the step. A deterministic engine decides
    it by `context`, the most that a row may have: a row's bits must not depend on other rows.
    """
    if index is None or context <= index.top_k:
        return attend_to_all()
    if row_tiles.is_deterministic():
        return attend_to_selected()
    is_short = jnp.max(length, initial=0) <= index.top_k
    return lax.cond(is_short, attend_to_all, attend_to_selected)


def tokens_at_once(latents: VectorPool, index: TokenIndex) -> int:
    """Return the tokens of a prompt whose vectors are gathered at once."""
    return max(1, min(_TILE, _GATHERED // _gathered_bytes(latents, index)))


def rows_at_once(latents: VectorPool, index: TokenIndex, width: int) -> int:
    """Return the rows that decode `width` tokens whose vectors are gathered at once."""
    return max(1, _GATHERED_OF_ROWS // (width * _gathered_bytes(latents, index)))


def attend_to_selected(
    attend: _Attend,
    queries: Float[Array, "rows width heads features"],
    latents: VectorPool,
    layer: int,
    pages: Int[Array, "rows pages"],
    newest: Int[Array, "rows width"],
    index: TokenIndex,
) -> Float[Array, "rows width heads value_dim"]:
    """Return `attend` of each token over the vectors that the index selects for it.

    Each token is a row of its own, over its own pages. Of the row's pages only the selected vectors
    are read, in pieces of rows whose vectors take at most 1 GiB, or of one row. The number of
    pieces is known when the step is traced: a loop of XLA would end the CUDA graph.

    Args:
        attend: `latent_attention` without an index, with all operands.
        queries: The tokens of each row.
        latents: The vectors of all tokens.
        layer: The layer of both pools.
        pages: Pages of each row, in both pools.
        newest: Last position that a token sees, -1 for padding.
        index: The index, over `[rows, width]` tokens.
    """
    (num_rows, width), outs = queries.shape[:2], []
    count = -(-num_rows // rows_at_once(latents, index, width))
    size = -(-num_rows // count)  # of all pieces but the last, so that they share a kernel
    for first in range(0, num_rows, size):
        some = slice(first, first + size)
        own = index.of_tokens(lambda x, some=some: x[some])
        seen = newest[some]
        if outs:  # The barrier orders the pieces: vectors of one are freed before the next's.
            seen, outs[-1] = lax.optimization_barrier((seen, outs[-1]))
        outs.append(_attend_piece(attend, queries[some], latents, layer, pages[some], seen, own))
    return jnp.concatenate(outs) if len(outs) > 1 else outs[0]


def _attend_piece(attend, queries, latents, layer, pages, newest, index):
    num_rows, width, *of_token = queries.shape
    layers, num_pages, page_size, features = latents.shape
    context, tokens, span = pages.shape[1] * page_size, num_rows * width, _span(index)
    pages, newest = jnp.clip(pages, 0, num_pages - 1), jnp.clip(newest, -1, context - 1)

    place = index.best(index_scores(index, layer, pages, newest))
    place = jnp.pad(place, ((0, 0), (0, 0), (0, span - index.top_k)))
    # The best are followed by positions that the token does not see, which nothing may read; one
    # position in place of all of them stays in the GPU's cache.
    place = jnp.minimum(place, jnp.maximum(newest, 0)[:, :, None])
    page = jnp.take_along_axis(pages[:, None], place // page_size, axis=2)
    vector = (layer * num_pages + page) * page_size + place % page_size
    # The barrier keeps XLA from recomputing an index for every element that it gathers.
    vector = lax.optimization_barrier(vector)
    vectors = latents.reshape(layers * num_pages * page_size, features)
    gathered = vectors.at[vector].get(mode="promise_in_bounds")
    pool = gathered.reshape(1, tokens * span // PAGE, PAGE, features)

    number, of_row = jnp.arange(1, tokens + 1, dtype=jnp.int32), span // PAGE
    tables = jnp.arange(tokens * of_row, dtype=jnp.int32).reshape(tokens, of_row)
    count = jnp.minimum(newest.reshape(tokens) + 1, index.top_k)
    unread = jnp.zeros_like(number)  # only recurrent layers read it
    rows = DecodeRegion(number, count - 1, jnp.minimum(count, 1), unread, unread)
    queries = queries.reshape(tokens, 1, *of_token)
    out = attend(queries, pool, jnp.int32(0), jnp.pad(tables, ((1, 0), (0, 0))), rows)
    return out.reshape(num_rows, width, *out.shape[2:])


def _gathered_bytes(latents, index):
    """Bytes of the vectors of one token."""
    return _span(index) * latents.shape[3] * latents.dtype.itemsize


def _span(index):
    """Positions of a token's pages."""
    return -(-index.top_k // PAGE) * PAGE
