"""Parts of attention's references: the longest row, tiles of prompt chunks, the softmax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import device
from jaxspec.pallas import dispatch
from jaxspec.regions import DecodeRegion, PrefillRegion, owner_of

_MIN_CONTEXT = 128  # positions read per row, however short the rows are
_SCORES_AT_ONCE = 2**22  # of tiles side by side, for gradients
_SCORES_ON_GPU = 2**25  # of an iteration: 128 MB

_PageTables = Int[Array, "slots pages"]
_Scalar = Int[Array, ""]

Sinks = Float[Array, " heads"]
"""Score of each query head for attending to nothing; float32."""


def over_longest_row(
    attend: Callable[[_PageTables], Float[Array, "..."]],
    page_tables: _PageTables,
    rows: DecodeRegion,
    page_size: int,
) -> Float[Array, "..."]:
    """Return `attend` of the first pages of each row, as many as the longest row needs.

    On a CPU, where every page that is read costs time, masked or not, the number is rounded up to
    one of a few that double. Elsewhere it is all: on a GPU, choosing the branch would need a round
    trip to the host.
    """
    if not _chooses_width():
        return attend(page_tables)
    num_slots, table_width = page_tables.shape
    widths = _widths(table_width, page_size)
    widths[-1] = table_width
    length = jnp.where(rows.is_live(num_slots), rows.num_computed + rows.query_len, 0)
    longest = jnp.max(length, initial=0)
    branch = jnp.sum(longest > page_size * jnp.array(widths[:-1], jnp.int32))
    branches = [functools.partial(attend, page_tables[:, :width]) for width in widths]
    return jax.lax.switch(branch, branches)


def _chooses_width() -> bool:
    return device.default_device().platform == "cpu"


def _widths(table_width: int, page_size: int) -> list[int]:
    widths = [-(-_MIN_CONTEXT // page_size)]
    while widths[-1] < table_width:
        widths.append(2 * widths[-1])
    return widths


def whole_context(table_width: int, page_size: int) -> int:
    """Return the width of page tables with which a row's length determines how many are read.

    `over_longest_row` reads no more than `table_width` pages, so it sums up fewer positions than
    with a wider table. The result is the first of its widths that is not below `table_width`; where
    it has one width, `table_width`.
    """
    if not _chooses_width():
        return table_width
    return _widths(table_width, page_size)[-1]


def tiles_at_once(most: int, scores: int) -> int:
    """Return the tiles that one iteration computes: on a GPU, enough to occupy it.

    Args:
        most: Number of tiles.
        scores: Scores per tile.
    """
    if device.default_device().platform == "cpu" or dispatch.longest() is not None:
        return 1
    return max(1, min(most, _SCORES_ON_GPU // scores))


def in_tiles(
    tokens: Any,
    chunks: PrefillRegion,
    is_live: Bool[Array, " seqs"],
    attend: Callable[[Any, _Scalar, _Scalar], Float[Array, "tile heads head_dim"]],
    *,
    tile: int,
    scores: int | None,
) -> Float[Array, "tokens heads head_dim"]:
    """Return `attend` of all tokens of live chunks, tile by tile, and zeros for padding.

    A tile never spans two chunks, so only real tokens take time.

    Args:
        tokens: Arrays `[tokens, ...]`, such as the queries.
        chunks: The chunks, at least one.
        is_live: The chunks that are computed.
        attend: Takes the arrays of a tile, the number of its chunk, and the offset of its first
            token in the chunk. Results of tokens after the chunk's end are dropped.
        tile: Tokens per tile.
        scores: Scores per tile, at most; None computes one tile per iteration, for `attend` that
            runs a kernel.
    """
    num_tokens, num_seqs = jax.tree.leaves(tokens)[0].shape[0], chunks.slots.shape[0]
    length = jnp.where(is_live, chunks.query_len, 0)
    tiles_end = jnp.cumsum((length + tile - 1) // tile, dtype=jnp.int32)

    def pad(x):  # room for the last tile
        return jnp.pad(x, ((0, tile), *((0, 0),) * (x.ndim - 1)))

    padded = jax.tree.map(pad, tokens)

    def first_tile(seq):
        return jnp.where(seq > 0, tiles_end[jnp.maximum(seq - 1, 0)], 0)

    def attend_tile(number):
        seq = owner_of(number, tiles_end)
        offset = (number - first_tile(seq)) * tile
        start = chunks.query_start[seq] + offset
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, tile), padded)
        return attend(own, seq, offset)

    most = (num_tokens + (tile - 1) * num_seqs) // tile
    batch = 1 if scores is None else max(1, min(num_seqs, _SCORES_AT_ONCE // scores))
    group = 1 if scores is None else tiles_at_once(most, scores)
    if group == 1:
        tiles = dispatch.stacked(tiles_end[-1], most, attend_tile, batch=batch)
    else:
        each = jnp.arange(group, dtype=jnp.int32)
        tiles = dispatch.stacked(
            (tiles_end[-1] + group - 1) // group,
            -(-most // group),
            lambda number: jax.vmap(attend_tile)(number * group + each),
        )
        tiles = tiles.reshape(tiles.shape[0] * group, *tiles.shape[2:])

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = owner_of(token, chunks.query_start[1:])
    offset = token - chunks.query_start[seq]
    real = (offset >= 0) & (offset < length[seq])
    place = jnp.where(real, first_tile(seq) + offset // tile, 0)
    return jnp.where(real[:, None, None], tiles[place, offset % tile], 0)


def masked_softmax(
    scores: Float[Array, "*rows kv_heads group tokens context"], sinks: Sinks | None
) -> Float[Array, "*rows kv_heads group tokens context"]:
    """Return the softmax over the context; a token whose scores are all -inf gets zeros.

    A head's sink is one more score, whose value is zero (Xiao et al. 2023, "Efficient Streaming
    Language Models with Attention Sinks", arXiv 2309.17453).
    """
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        heads = sinks.reshape((1,) * (scores.ndim - 4) + scores.shape[-4:-2] + (1, 1))
        largest = jnp.maximum(largest, heads)
    # A token without scores has -inf and 0 here, and gets 0 and 1.
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0.0))
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(heads - largest)
    return weights / jnp.where(total > 0, total, 1.0)
