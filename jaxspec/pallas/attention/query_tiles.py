"""Loop over the queries of prompt chunks in tiles, for references of prefill attention."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import device
from jaxspec.pallas import dispatch
from jaxspec.regions import PrefillRegion

_SCORES_AT_ONCE = 2**22  # of tiles side by side, for gradients
_SCORES_ON_GPU = 2**25  # of an iteration: 128 MB

_Queries = Float[Array, "tokens heads head_dim"]
_Scalar = Int[Array, ""]


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
    queries: _Queries,
    chunks: PrefillRegion,
    is_live: Bool[Array, " seqs"],
    attend: Callable[[_Queries, _Scalar, _Scalar], _Queries],
    *,
    tile: int,
    context: int,
) -> _Queries:
    """Return `attend` of all tokens of live chunks, tile by tile, and zeros for padding.

    A tile never spans two chunks, so only real tokens take time.

    Args:
        queries: The queries of all tokens.
        chunks: The chunks, at least one.
        is_live: The chunks that are computed.
        attend: Takes the queries of a tile, the number of its chunk, and the offset of its first
            token in the chunk. Results of tokens after the chunk's end are dropped.
        tile: Tokens per tile.
        context: Positions that a tile attends to, at most.
    """
    num_tokens, num_seqs = queries.shape[0], chunks.slots.shape[0]
    length = jnp.where(is_live, chunks.query_len, 0)
    tiles_end = jnp.cumsum((length + tile - 1) // tile, dtype=jnp.int32)
    padded = jnp.pad(queries, ((0, tile), (0, 0), (0, 0)))  # room for the last tile

    def first_tile(seq):
        return jnp.where(seq > 0, tiles_end[jnp.maximum(seq - 1, 0)], 0)

    def attend_tile(number):
        seq = jnp.searchsorted(tiles_end, number, side="right").astype(jnp.int32)
        seq = jnp.minimum(seq, num_seqs - 1)
        offset = (number - first_tile(seq)) * tile
        start = chunks.query_start[seq] + offset
        return attend(jax.lax.dynamic_slice_in_dim(padded, start, tile), seq, offset)

    most = (num_tokens + (tile - 1) * num_seqs) // tile
    scores = tile * queries.shape[1] * context
    batch = max(1, min(num_seqs, _SCORES_AT_ONCE // scores))
    group = tiles_at_once(most, scores)
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
    seq = jnp.searchsorted(chunks.query_start[1:], token, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq, num_seqs - 1)
    offset = token - chunks.query_start[seq]
    real = (offset >= 0) & (offset < length[seq])
    place = jnp.where(real, first_tile(seq) + offset // tile, 0)
    return jnp.where(real[:, None, None], tiles[place, offset % tile], 0)
