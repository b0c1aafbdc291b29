"""Attention over latents against float64 attention with keys and values of each head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, decode_rows, int32, kv_slots_of, normal, prompt_chunks

from jaxspec.pallas.attention.latent import (
    latent_attention,
    latent_attention_reference,
    latent_prefill_attention,
)
from jaxspec.pallas.attention.token_index import TokenIndex
from jaxspec.pallas.paging.kv_write import vector_write

LAYERS, PAGES, PAGE_SIZE, HEADS, RANK, SHARED = 2, 40, 4, 6, 8, 4
WIDTH = RANK + SHARED
SCALE = 0.3
SIZES = {"value_dim": RANK, "scale": SCALE}
INDEX_HEADS, INDEX_DIM = 3, 5

decode = jax.jit(latent_attention, static_argnums=2, static_argnames=("value_dim", "scale"))
prefill = jax.jit(
    latent_prefill_attention, static_argnums=2, static_argnames=("value_dim", "scale")
)


def attended(queries, vectors, first, selected=None):
    """float64 attention of tokens from `first` on; `selected` gives the positions for a token."""
    out = np.zeros((*queries.shape[:2], RANK))
    for token, head in np.ndindex(queries.shape[:2]):
        seen = np.arange(first + token + 1)
        if selected is not None:
            seen = selected(token, seen)
        scores = vectors[seen].astype(np.float64) @ queries[token, head] * SCALE
        weights = np.exp(scores - scores.max())
        out[token, head] = weights / weights.sum() @ vectors[seen, :RANK]
    return out


def stored(rng, pool, pages, length, width=WIDTH):
    """The pool with random vectors at positions `0..length - 1` of the pages, and the vectors."""
    vectors = normal(rng, length, width)
    slots = kv_slots_of(np.asarray(pages), PAGE_SIZE, length)
    return vector_write(pool, 1, jnp.asarray(vectors), slots), vectors


def nan_pool(width=WIDTH):
    return jnp.full((LAYERS, PAGES, PAGE_SIZE, width), jnp.nan)  # what others left behind


@pytest.mark.parametrize("width", [1, 4, 8])
def test_decoding_equals_attention_over_the_history(width):
    rng = np.random.default_rng(width)
    pool, tables = nan_pool(), np.zeros((4, 9), np.int32)
    tables[1:] = 1 + rng.permutation(27).reshape(3, 9)
    query_len = np.array([min(width, 3), width, 0, 1, width], np.int32)
    slots = np.array([1, 2, 3, 3, 10**6], np.int32)
    num_computed = np.array([8, 36 - width, 3, 0, -4], np.int32)
    queries, expected = normal(rng, 5, width, HEADS, WIDTH), np.zeros((5, width, HEADS, RANK))
    for row in range(5):
        queries[row, query_len[row] :] = np.nan
    for row in (0, 1, 3):
        real = query_len[row]
        pool, vectors = stored(rng, pool, tables[slots[row]], num_computed[row] + real)
        expected[row, :real] = attended(queries[row, :real], vectors, num_computed[row])
    rows = decode_rows(slots, num_computed, query_len)
    out = decode(jnp.asarray(queries), pool, 1, jnp.asarray(tables), rows, **SIZES)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_a_prompt_in_chunks_equals_attention_over_the_history():
    """Chunks longer than a tile, one behind a cached prefix, padding between nothing."""
    rng = np.random.default_rng(3)
    pool, tables = nan_pool(), np.zeros((4, 20), np.int32)
    tables[1], tables[2, :19] = 1 + rng.permutation(20), 21 + rng.permutation(19)[:19]
    starts, counts = (5, 0), (70, 66)
    queries = normal(rng, 150, HEADS, WIDTH)
    expected, first = np.zeros((150, HEADS, RANK)), 0
    for slot, computed, count in zip((1, 2), starts, counts, strict=True):
        pool, vectors = stored(rng, pool, tables[slot], computed + count)
        part = slice(first, first + count)
        expected[part] = attended(queries[part], vectors, computed)
        first += count
    queries[first:] = np.nan
    chunks = prompt_chunks([1, 2, GARBAGE[0]], [*starts, GARBAGE[1]], [0, 70, 136, 136])
    out = prefill(jnp.asarray(queries), pool, 1, jnp.asarray(tables), chunks, **SIZES)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("longest", [1, 128, 129, 400])
def test_the_longest_row_bounds_what_is_read_and_changes_nothing(longest):
    rng = np.random.default_rng(longest)
    pages = 25
    pool = jnp.asarray(normal(rng, 1, 1 + 2 * pages, 16, WIDTH))
    tables = np.zeros((3, pages), np.int32)
    tables[1:] = 1 + rng.permutation(2 * pages).reshape(2, pages)
    queries = jnp.asarray(normal(rng, 3, 2, HEADS, WIDTH))
    rows = decode_rows([2, 0, 1], [longest - 1, 10**6, longest // 3], [1, 2, 1])
    operands = queries, pool, 0, jnp.asarray(tables), rows
    plain = latent_attention_reference(*operands, **SIZES)
    np.testing.assert_allclose(decode(*operands, **SIZES), plain, atol=1e-6)


def test_a_rejected_draft_that_is_nan_spoils_no_earlier_token():
    rng, tables = np.random.default_rng(0), int32([[0, 0], [1, 2]])
    pool, _ = stored(rng, nan_pool(), [1, 2], 8)
    queries = jnp.asarray(normal(rng, 1, 4, HEADS, WIDTH))
    operands = tables, decode_rows([1], [4], [4])
    whole = decode(queries, pool, 1, *operands, **SIZES)
    spoiled = vector_write(pool, 1, jnp.full((1, WIDTH), jnp.nan), int32([2 * PAGE_SIZE + 2]))
    out = decode(queries, spoiled, 1, *operands, **SIZES)
    np.testing.assert_array_equal(out[0, :2], whole[0, :2])
    assert np.isnan(out[0, 2:]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_narrow_pools_are_read_as_they_are(dtype):
    rng, tables = np.random.default_rng(1), int32([[0, 0], [1, 2]])
    pool, _ = stored(rng, nan_pool().astype(dtype), [1, 2], 8)
    queries = jnp.asarray(normal(rng, 1, 2, HEADS, WIDTH))
    rows = decode_rows([1], [6], [2])
    out = decode(queries, pool, 1, tables, rows, **SIZES)
    wide = decode(queries, pool.astype(jnp.float32), 1, tables, rows, **SIZES)
    np.testing.assert_allclose(out, wide, atol=1e-6)
    narrow = decode(queries.astype(jnp.bfloat16), pool, 1, tables, rows, **SIZES)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, atol=0.05)


def test_without_rows_or_chunks_there_is_nothing():
    rng, pool, tables = np.random.default_rng(0), nan_pool(), int32([[0, 0], [1, 2]])
    rows = decode_rows([], [], [])
    none = jnp.zeros((0, 2, HEADS, WIDTH))
    assert latent_attention(none, pool, 0, tables, rows, **SIZES).shape == (0, 2, HEADS, RANK)
    chunks, queries = prompt_chunks([], [], [0]), jnp.asarray(normal(rng, 3, HEADS, WIDTH))
    out = latent_prefill_attention(queries, pool, 0, tables, chunks, **SIZES)
    np.testing.assert_array_equal(out, np.zeros((3, HEADS, RANK)))


class Indexed:
    """An index over one row's history, and the selection in float64."""

    def __init__(self, rng, pages, length, first, count, top_k):
        self.pool, self.keys = stored(rng, nan_pool(INDEX_DIM), pages, length, INDEX_DIM)
        self.queries = normal(rng, count, INDEX_HEADS, INDEX_DIM)
        self.weights, self.top_k = normal(rng, count, INDEX_HEADS), top_k
        self.first = first

    def operand(self, *shape):
        queries, weights = (
            jnp.asarray(x).reshape(*shape, *x.shape[1:]) for x in (self.queries, self.weights)
        )
        return TokenIndex(queries, weights, self.pool, self.top_k)

    def __call__(self, token, seen):
        products = self.queries[token].astype(np.float64) @ self.keys[seen].T
        score = self.weights[token] @ np.maximum(products, 0)
        return seen[np.argsort(-score, kind="stable")[: self.top_k]]


@pytest.mark.parametrize("top_k", [1, 7, 35, 36, 100])
def test_a_token_attends_to_the_best_tokens_of_the_index(top_k):
    """Up to a context of so many tokens to all of them."""
    rng, pages, length, count = np.random.default_rng(top_k), np.arange(1, 10), 35, 3
    first = length - count
    index = Indexed(rng, pages, length, first, count, top_k)
    pool, vectors = stored(rng, nan_pool(), pages, length)
    queries, tables = normal(rng, count, HEADS, WIDTH), int32([np.zeros(9, int), pages])
    expected = attended(queries, vectors, first, index)
    out = decode(
        jnp.asarray(queries)[None],
        pool,
        1,
        tables,
        decode_rows([1], [first], [count]),
        **SIZES,
        index=index.operand(1, count),
    )
    np.testing.assert_allclose(out[0], expected, atol=2e-6)
    chunks = prompt_chunks([1], [first], [0, count])
    out = prefill(
        jnp.asarray(queries), pool, 1, tables, chunks, **SIZES, index=index.operand(count)
    )
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_an_index_that_selects_everything_changes_no_bit():
    rng, pages, length = np.random.default_rng(5), np.arange(1, 10), 36
    pool, _ = stored(rng, nan_pool(), pages, length)
    queries = jnp.asarray(normal(rng, 1, 4, HEADS, WIDTH))
    operands = queries, pool, 1, int32([np.zeros(9, int), pages]), decode_rows([1], [32], [4])
    index = Indexed(rng, pages, length, 32, 4, length).operand(1, 4)
    without, selecting = decode(*operands, **SIZES), decode(*operands, **SIZES, index=index)
    np.testing.assert_array_equal(selecting, without)
