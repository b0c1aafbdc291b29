"""A donated pool is written in place: a step over several layers copies none of it.

As in a model, each layer's input `x` depends on what the layer before read from the pool: that
orders the reads before the next write.
"""

import jax
import jax.numpy as jnp
import pytest
from regions import decode_region, prefill_region

from jaxspec.pallas.attention.paged import paged_attention
from jaxspec.pallas.attention.prefill import prefill_attention
from jaxspec.pallas.attention.window import window_attention, window_prefill, window_scan
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.prefill import gdn_prefill
from jaxspec.pallas.gated_delta.step import gdn_scan, gdn_step
from jaxspec.pallas.mamba2.heads import Mamba2Ring, Mamba2Tokens
from jaxspec.pallas.mamba2.prefill import mamba2_prefill
from jaxspec.pallas.mamba2.replay import mamba2_replay
from jaxspec.pallas.mamba2.step import mamba2_scan, mamba2_step
from jaxspec.pallas.paging.kv_write import kv_write
from jaxspec.pallas.recurrent.conv_update import conv_prefill, conv_update
from jaxspec.pallas.recurrent.token_scan import conv_scan
from jaxspec.regions import DecodeRegion, PrefillRegion, TokenRegion

LAYERS, ROWS, WIDTH, TOKENS = 3, 2, 2, 8
ONE = jnp.ones(ROWS, jnp.int32)
SLOTS = jnp.arange(1, 1 + ROWS, dtype=jnp.int32)
SCANNED = jnp.array([1, 1, 2, 2], jnp.int32)


def scanned(start):
    rows = decode_region(SCANNED, 1, num_computed=start[0])
    return TokenRegion.of(rows, jnp.zeros_like(SCANNED))


def attention(pool, layer, x, start):
    new = jnp.ones((TOKENS, 1, 4)) + x
    pool = kv_write(pool, layer, new, new, jnp.arange(8, 8 + TOKENS, dtype=jnp.int32))
    tables = jnp.ones((4, 3), jnp.int32)
    rectangle = jnp.ones((ROWS, WIDTH, 2, 4))
    rows = DecodeRegion(
        slots=SLOTS, num_computed=ONE, query_len=ONE, state_offset=ONE, ring_length=ONE
    )
    out = paged_attention(rectangle, pool, layer, tables, rows)
    chunks = PrefillRegion(slots=SLOTS, num_computed=ONE, query_start=start, state_offset=ONE)
    prompts = prefill_attention(jnp.ones((TOKENS, 2, 4)), pool, layer, tables, chunks)
    return out.sum() + prompts.sum(), pool


def windows(pool, layer, x, start):
    """Prompts come first, as in `DecoderLayer`: rows read after they have written."""
    chunks, new = prefill_region(SLOTS, start, num_computed=1), jnp.ones((TOKENS, 1, 4)) + x
    z, pool = window_prefill(jnp.ones((TOKENS, 2, 4)), new, new, pool, layer, chunks, window=7)
    rows = decode_region(SLOTS, 1, num_computed=start[:ROWS])
    new = jnp.ones((ROWS, WIDTH, 1, 4)) + x
    y, pool = window_attention(jnp.ones((ROWS, WIDTH, 2, 4)), new, new, pool, layer, rows, window=7)
    return y.sum() + z.sum(), pool


def scanned_windows(pool, layer, x, start):
    new = jnp.ones((len(SCANNED), 1, 4)) + x
    queries = jnp.ones((len(SCANNED), 2, 4))
    out, pool = window_scan(queries, new, new, pool, layer, scanned(start), window=7)
    return out.sum(), pool


def convolution(pool, layer, x, start):
    weight = jnp.ones((3, 4))
    rows = decode_region(SLOTS, 1, num_computed=start[:ROWS])
    y, pool = conv_update(jnp.ones((ROWS, WIDTH, 4)) + x, weight, pool, layer, rows)
    chunks = prefill_region(SLOTS, start, num_computed=1)
    z, pool = conv_prefill(jnp.ones((TOKENS, 4)), weight, pool, layer, chunks)
    scans, pool = conv_scan(
        jnp.ones((len(SCANNED), 4)) + z.sum(), weight, pool, layer, scanned(start)
    )
    return y.sum() + scans.sum(), pool


def recurrence(pool, layer, x, start):
    for rows in (1, ROWS):  # one row alone once made XLA copy the pool
        x, pool = _recurrence(pool, layer, x, rows, start)
    return x, pool


def _recurrence(pool, layer, x, rows, start):
    def tokens(*batch):
        vectors, gate = jnp.ones((*batch, 2, 4)) + x, jnp.ones((*batch, 2))
        return GdnTokens(vectors, vectors, vectors, gate, gate)

    region = decode_region(SLOTS[:rows], 1, state_offset=1)
    y, pool = gdn_step(tokens(rows, WIDTH), pool, layer, region)
    chunks = prefill_region(SLOTS, start, num_computed=1, state_offset=1)
    z, pool = gdn_prefill(tokens(TOKENS), pool, layer, chunks)
    x = y.sum() + z.sum()
    scans, pool = gdn_scan(tokens(len(SCANNED)), pool, layer, scanned(start))
    return x + scans.sum(), pool


def mamba2(pool, layer, x, start):
    for rows in (1, ROWS):
        region = decode_region(SLOTS[:rows], 1, state_offset=1)
        y, pool = mamba2_step(_mamba2_tokens(x, rows, WIDTH), pool, layer, region)
        x = y.sum()
    chunks = prefill_region(SLOTS, start, num_computed=1, state_offset=1)
    y, pool = mamba2_prefill(_mamba2_tokens(x, TOKENS), pool, layer, chunks)
    tokens = _mamba2_tokens(y.sum(), len(SCANNED))
    y, pool = mamba2_scan(tokens, pool, layer, scanned(start))
    return y.sum(), pool


def _mamba2_tokens(x, *batch):
    heads, shared = jnp.ones(2), jnp.ones((*batch, 1, 4)) + x
    steps = jnp.ones((*batch, 2)) + x
    return Mamba2Tokens(jnp.ones((*batch, 2, 4)) + x, steps, heads, shared, shared, heads)


def replay(pools, layer, x, start):
    for rows in (1, ROWS):
        region = DecodeRegion(*[start[:rows]] * 5)  # arguments: no fold must be known beforehand
        tokens = Mamba2Tokens(*_mamba2_tokens(x, rows, WIDTH))
        y, *pools = mamba2_replay(tokens, *pools, layer, region)
        x = y.sum()
    return x, tuple(pools)


POOLS = {
    attention: (LAYERS, 2, 8192, 8, 1, 4),
    windows: (LAYERS, 8192, 8, 2, 1, 4),
    scanned_windows: (LAYERS, 8192, 8, 2, 1, 4),
    convolution: (LAYERS, 65536, 5, 4),
    recurrence: (LAYERS, 8192, 3, 2, 4, 4),
    mamba2: (LAYERS, 8192, 3, 2, 4, 4),
    replay: (
        (LAYERS, 8192, 1, 2, 4, 4),
        Mamba2Ring((LAYERS, 8192, 8, 2, 4), (LAYERS, 8192, 8, 1, 4), (LAYERS, 8192, 8, 2), 6),
    ),
}


@pytest.mark.parametrize("layer_step", POOLS)
def test_a_donated_pool_is_written_in_place(layer_step):
    def step(pool, start):
        total = jnp.zeros(())
        for layer in range(LAYERS):
            out, pool = layer_step(pool, layer, total, start)
            total = total + out
        return total, pool

    pool = jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct(dims, jnp.float32),
        POOLS[layer_step],
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )
    # An argument, as in a step: XLA's GPU compiler fails on loops whose bounds are constants.
    start = jax.ShapeDtypeStruct((1 + ROWS,), jnp.int32)
    memory = jax.jit(step, donate_argnums=0).lower(pool, start).compile().memory_analysis()
    size = 4 * sum(x.size for x in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / LAYERS / 4
