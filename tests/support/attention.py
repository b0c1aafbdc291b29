"""Attention in float64, the regions that attention ops take, and values that padding may hold."""

import jax.numpy as jnp
import numpy as np

from jaxspec.regions import DecodeRegion, PrefillRegion

GARBAGE = [10**6, -5, 2**31 - 1, -(2**31)]


def attention_oracle(queries, keys, values, first_position, window=None, sinks=None):
    """float64 causal attention of `queries` [n, heads, dim] standing at `first_position` on.

    With a window each sees as many positions, with sinks each head has one more score.
    """
    out = np.zeros(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for token, head in np.ndindex(queries.shape[:2]):
        end = first_position + token + 1
        seen = slice(max(0, end - (window or end)), end)
        scores = keys[seen, head // group].astype(np.float64) @ queries[token, head]
        weights = np.exp((scores - scores.max()) / np.sqrt(queries.shape[2]))
        sink = (
            0 if sinks is None else np.exp(sinks[head] - scores.max() / np.sqrt(queries.shape[2]))
        )
        out[token, head] = weights / (weights.sum() + sink) @ values[seen, head // group]
    return out


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def decode_rows(slots, num_computed, query_len) -> DecodeRegion:
    """A rectangle; what only recurrent layers read holds garbage."""
    unread = jnp.full(len(slots), GARBAGE[0], jnp.int32)
    return DecodeRegion(
        slots=int32(slots),
        num_computed=int32(num_computed),
        query_len=int32(query_len),
        state_offset=unread,
        ring_length=unread,
    )


def prompt_chunks(slots, num_computed, query_start) -> PrefillRegion:
    """Chunks laid flat; what only recurrent layers read holds garbage."""
    return PrefillRegion(
        slots=int32(slots),
        num_computed=int32(num_computed),
        query_start=int32(query_start),
        state_offset=jnp.full(len(slots), GARBAGE[0], jnp.int32),
    )


def kv_slots_of(pages, page_size, length):
    """The KV slots of positions `0..length - 1` of a row with these pages."""
    position = np.arange(length)
    return int32(pages[position // page_size] * page_size + position % page_size)
