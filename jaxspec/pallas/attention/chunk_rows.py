"""Prompt chunks as decode rows of a few tokens, for kernels that take rows."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.regions import DecodeRegion, PrefillRegion, owner_of

_QUERIES = 64  # per tile of the kernels (`online_softmax_block.ROWS`)
_MAX_POSITION = 2**30  # clips positions of padding, to which offsets are added


def attend_by_rows(
    attend: Callable[[Array, DecodeRegion], Float[Array, "rows width heads value_dim"]],
    queries: Float[Array, "tokens heads features"],
    chunks: PrefillRegion,
    num_slots: int,
    group: int,
) -> Float[Array, "tokens heads value_dim"]:
    """Return `attend` of all tokens of live chunks, and zeros for padding.

    Args:
        attend: Takes queries `[rows, width, heads, features]` and their region.
        group: Query heads that share a key. A row has as many tokens as fill tiles of queries.
    """
    num_tokens, width = queries.shape[0], _QUERIES // math.gcd(_QUERIES, group)
    rows, tokens, place = _rows(chunks, num_tokens, num_slots, width)
    # The barrier keeps XLA from recomputing an index for every element that it gathers.
    rows, tokens, place = lax.optimization_barrier((rows, tokens, place))
    out = attend(queries[tokens], rows)
    out = out.reshape(tokens.size, *out.shape[2:])
    return out.at[place].get(mode="fill", fill_value=0)


def _rows(
    chunks: PrefillRegion, num_tokens: int, num_slots: int, width: int
) -> tuple[DecodeRegion, Int[Array, "rows width"], Int[Array, " tokens"]]:
    """Return rows of up to `width` tokens, their tokens, and the place of each token in the rows.

    The place of a token outside every live chunk is past the last one.
    """
    num_seqs, starts = chunks.slots.shape[0], chunks.query_start[:-1]
    length = jnp.where(chunks.is_live(num_slots), jnp.clip(chunks.query_len, 0, num_tokens), 0)
    rows_end = jnp.cumsum((length + width - 1) // width, dtype=jnp.int32)
    first_row = jnp.concatenate([jnp.zeros(1, jnp.int32), rows_end[:-1]])

    row = jnp.arange(num_tokens // width + num_seqs, dtype=jnp.int32)
    seq = owner_of(row, rows_end)
    offset = (row - first_row[seq]) * width
    count = jnp.clip(length[seq] - offset, 0, width)
    computed = jnp.clip(chunks.num_computed[seq], 0, _MAX_POSITION)
    nothing = jnp.zeros_like(row)
    region = DecodeRegion(
        slots=jnp.where(count > 0, chunks.slots[seq], 0),
        num_computed=computed + offset,
        query_len=count,
        state_offset=nothing,
        ring_length=nothing,
    )
    tokens = (starts[seq] + offset)[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = owner_of(token, chunks.query_start[1:])
    within = token - starts[owner]
    is_real = (within >= 0) & (within < length[owner])
    place = first_row[owner] * width + within
    return region, tokens.clip(0, num_tokens - 1), jnp.where(is_real, place, tokens.size)
