"""Regions of index lists, for tests of ops; fields that an op does not read may be left out."""

import jax.numpy as jnp

from jaxspec.regions import DecodeRegion, PrefillRegion


def decode_region(slots, query_len, *, num_computed=0, state_offset=0, ring_length=0):
    """A `DecodeRegion`; a single number stands for every row."""
    slots = jnp.asarray(slots, jnp.int32)
    fields = num_computed, query_len, state_offset, ring_length
    num_computed, query_len, state_offset, ring_length = (_like(slots, x) for x in fields)
    return DecodeRegion(slots, num_computed, query_len, state_offset, ring_length)


def prefill_region(slots, query_start, *, num_computed=0, state_offset=0):
    """A `PrefillRegion`; a single number stands for every sequence."""
    slots = jnp.asarray(slots, jnp.int32)
    start = jnp.asarray(query_start, jnp.int32)
    return PrefillRegion(slots, _like(slots, num_computed), start, _like(slots, state_offset))


def _like(slots, x):
    return jnp.broadcast_to(jnp.asarray(x, jnp.int32), slots.shape)
