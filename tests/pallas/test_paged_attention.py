"""paged_attention and kv_write against float64 attention over a contiguous history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.paged_attention import kv_write, paged_attention, paged_attention_reference

LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEADS, DIM = 2, 12, 4, 2, 6, 8
GARBAGE = [10**6, -5, 2**31 - 1, -(2**31)]


def attention_oracle(queries, keys, values, first_position):
    """float64 causal attention of `queries` [n, heads, dim] standing at `first_position` on."""
    out = np.zeros(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for token, head in np.ndindex(queries.shape[:2]):
        seen = first_position + token + 1
        scores = keys[:seen, head // group].astype(np.float64) @ queries[token, head]
        weights = np.exp((scores - scores.max()) / np.sqrt(queries.shape[2]))
        out[token, head] = weights / weights.sum() @ values[:seen, head // group]
    return out


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def store(rng, kv, layer, pages, length):
    """Random keys and values written at positions `0..length - 1` of the pages."""
    keys, values = normal(rng, length, KV_HEADS, DIM), normal(rng, length, KV_HEADS, DIM)
    place = np.arange(length)
    slots = pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
    kv = kv_write(kv, layer, jnp.asarray(keys), jnp.asarray(values), jnp.asarray(slots, jnp.int32))
    return kv, keys, values


@pytest.mark.parametrize("width", [1, 4])
def test_paged_attention_equals_attention_over_the_history(width):
    rng = np.random.default_rng(width)
    kv = jnp.full((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.nan)  # what others left behind
    tables = np.zeros((4, 5), np.int32)
    tables[1, :3], tables[2, :5], tables[3, :2] = [4, 9, 2], [1, 11, 5, 3, 7], [6, 8]
    query_len = np.array([min(width, 3), width, 0, 1, width], np.int32)
    slots = np.array([1, 2, 3, 3, 10**6], np.int32)
    num_computed = np.array([8, 20 - width, 3, 0, -4], np.int32)
    history = []
    for row in (0, 1, 3):
        length = num_computed[row] + query_len[row]
        kv, keys, values = store(rng, kv, 1, tables[slots[row]], length)
        history.append((row, keys, values))
    queries = normal(rng, 5, width, HEADS, DIM)
    for row in range(5):
        queries[row, query_len[row] :] = np.nan
    indices = map(jnp.asarray, (tables, slots, num_computed, query_len))
    out = jax.jit(paged_attention, static_argnums=2)(jnp.asarray(queries), kv, 1, *indices)
    expected = np.zeros(queries.shape)
    for row, keys, values in history:
        real = query_len[row]
        expected[row, :real] = attention_oracle(
            queries[row, :real], keys, values, num_computed[row]
        )
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("longest", [1, 127, 128, 129, 256, 257, 400])
def test_the_longest_row_bounds_what_is_read_and_changes_nothing(longest):
    rng = np.random.default_rng(longest)
    page_size, pages = 16, 25
    pool = normal(rng, 1, 2, 1 + 2 * pages, page_size, KV_HEADS, DIM)
    tables = np.zeros((3, pages), np.int32)
    tables[1:] = 1 + rng.permutation(2 * pages).reshape(2, pages)
    queries = jnp.asarray(normal(rng, 3, 2, HEADS, DIM))
    slots, query_len = jnp.asarray([2, 0, 1], jnp.int32), jnp.asarray([1, 2, 1], jnp.int32)
    num_computed = jnp.asarray([longest - 1, 10**6, longest // 3], jnp.int32)
    operands = queries, jnp.asarray(pool), 0, jnp.asarray(tables), slots, num_computed, query_len
    out = jax.jit(paged_attention, static_argnums=2)(*operands)
    np.testing.assert_allclose(out, paged_attention_reference(*operands), atol=1e-6)


def test_padding_is_inert_in_kv_write():
    rng = np.random.default_rng(0)
    kv = jnp.asarray(normal(rng, LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM))
    slots = jnp.asarray([-1, 0, PAGE_SIZE - 1, PAGES * PAGE_SIZE, *GARBAGE], jnp.int32)
    noise = jnp.full((len(slots), KV_HEADS, DIM), jnp.nan)
    np.testing.assert_array_equal(kv_write(kv, 1, noise, noise, slots), kv)


def test_a_layer_is_written_alone():
    rng = np.random.default_rng(0)
    kv = jnp.zeros((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM))
    kv, keys, values = store(rng, kv, 1, np.array([3, 5]), 6)
    assert not np.any(kv[0])
    flat = np.asarray(kv[1]).reshape(2, PAGES * PAGE_SIZE, KV_HEADS, DIM)
    np.testing.assert_array_equal(flat[0, [12, 13, 14, 15, 20, 21]], keys)
    np.testing.assert_array_equal(flat[1, [12, 13, 14, 15, 20, 21]], values)
    assert np.count_nonzero(flat) == keys.size + values.size


def test_bfloat16_pools_keep_bfloat16_queries():
    kv = jnp.ones((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.bfloat16)
    queries = jnp.ones((1, 2, HEADS, DIM), jnp.bfloat16)
    one = jnp.ones(1, jnp.int32)
    out = paged_attention(queries, kv, 1, jnp.ones((2, 3), jnp.int32), one, one, 2 * one)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones(out.shape))
