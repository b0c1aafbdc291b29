"""paged_attention against float64 attention over a contiguous history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import attention_oracle, decode_rows, int32, kv_slots_of, normal

from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.paged import (
    WIDE,
    paged_attention,
    paged_attention_reference,
    why_not_kernel,
    why_not_wide_kernel,
)
from jaxspec.pallas.paging.kv_write import kv_write

LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEADS, DIM = 2, 12, 4, 2, 6, 8

compiled = jax.jit(paged_attention, static_argnums=2)


def store(rng, kv, layer, pages, length):
    """The pool with random keys and values at positions `0..length - 1` of the pages, and these."""
    keys, values = normal(rng, length, KV_HEADS, DIM), normal(rng, length, KV_HEADS, DIM)
    slots = kv_slots_of(pages, PAGE_SIZE, length)
    return kv_write(kv, layer, jnp.asarray(keys), jnp.asarray(values), slots), keys, values


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
    rows = decode_rows(slots, num_computed, query_len)
    out = compiled(jnp.asarray(queries), kv, 1, jnp.asarray(tables), rows)
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
    rows = decode_rows([2, 0, 1], [longest - 1, 10**6, longest // 3], [1, 2, 1])
    operands = queries, jnp.asarray(pool), 0, jnp.asarray(tables), rows
    np.testing.assert_allclose(compiled(*operands), paged_attention_reference(*operands), atol=1e-6)


def test_a_gate_multiplies_what_was_attended():
    rng = np.random.default_rng(0)
    kv = jnp.asarray(normal(rng, LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM))
    queries = jnp.asarray(normal(rng, 2, 3, HEADS, DIM))
    gate = OutputGate(jnp.asarray(2 * normal(rng, 6, 2 * HEADS * DIM + 16)))
    operands = queries, kv, 1, int32([[0, 0], [1, 2], [3, 4]]), decode_rows([1, 2], [2, 4], [3, 2])
    plain = paged_attention(*operands)
    expected = gate(plain.reshape(6, HEADS, DIM)).reshape(plain.shape)
    np.testing.assert_allclose(compiled(*operands, gate), expected, atol=1e-6)
    with pytest.raises(ValueError, match="need a projection of 6 rows"):
        paged_attention(*operands, gate.split(5)[0])


def test_8_bit_pools_are_read_as_they_are():
    rng = np.random.default_rng(0)
    kv = jnp.zeros((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.float8_e4m3fn)
    tables = np.array([[0, 0, 0], [4, 9, 2], [1, 3, 5]], np.int32)
    for slot in (1, 2):
        kv, _, _ = store(rng, kv, 1, tables[slot], 12)
    queries = jnp.asarray(normal(rng, 3, 2, HEADS, DIM))
    tables, rows = jnp.asarray(tables), decode_rows([2, 0, 1], [10, 3, 5], [2, 2, 1])
    wide = compiled(queries, kv.astype(jnp.float32), 1, tables, rows)
    np.testing.assert_allclose(compiled(queries, kv, 1, tables, rows), wide, atol=1e-6)


def test_scaled_pools_are_read_as_the_products_of_numbers_and_scales():
    rng, scales = np.random.default_rng(0), jnp.asarray([0.375, 2.5])  # exact in float32
    kv = jnp.zeros((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.float8_e4m3fn)
    tables = np.array([[0, 0, 0], [4, 9, 2], [1, 3, 5]], np.int32)
    for slot in (1, 2):
        kv, _, _ = store(rng, kv, 1, tables[slot], 12)
    queries = jnp.asarray(normal(rng, 3, 2, HEADS, DIM))
    gate = OutputGate(jnp.asarray(2 * normal(rng, 6, 2 * HEADS * DIM)))
    indices = jnp.asarray(tables), decode_rows([2, 0, 1], [10, 3, 5], [2, 2, 1])
    wide = kv.astype(jnp.float32) * scales[None, :, None, None, None, None]
    for given in (None, gate):
        expected = compiled(queries, wide, 1, *indices, given)
        out = compiled(queries, kv, 1, *indices, given, scales)
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_bfloat16_pools_keep_bfloat16_queries():
    kv = jnp.ones((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.bfloat16)
    queries = jnp.ones((1, 2, HEADS, DIM), jnp.bfloat16)
    out = paged_attention(queries, kv, 1, jnp.ones((2, 3), jnp.int32), decode_rows([1], [1], [2]))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones(out.shape))


@pytest.mark.parametrize(
    ("dtype", "dim", "max_group"),
    [(jnp.bfloat16, 256, 64), (jnp.float8_e4m3fn, 256, 32), (jnp.float32, 256, 8)],
)
def test_heads_that_share_a_key_head_fit_in_a_query_tile(dtype, dim, max_group):
    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    kv = jax.ShapeDtypeStruct((1, 2, 4, 16, 1, dim), dtype)
    fits, exceeds = (
        jax.ShapeDtypeStruct((1, 1, heads, dim), wide) for heads in (max_group, max_group + 1)
    )
    assert why_not_kernel(fits, kv, kv.shape[3], None) is None
    assert f"{max_group + 1} heads that share a key head" in why_not_kernel(
        exceeds, kv, kv.shape[3], None
    )


def test_heads_of_512_have_a_kernel_in_bfloat16_alone():
    def why(dtype=jnp.bfloat16, page_size=16, scales=None, sinks=None):
        queries = jax.ShapeDtypeStruct((1, 12, 4, WIDE), jnp.bfloat16)
        kv = jax.ShapeDtypeStruct((1, 2, 4, page_size, 1, WIDE), dtype)
        return why_not_wide_kernel(queries, kv, scales, sinks)

    numbers = jnp.ones(4)
    assert why() is None and "20" in why(page_size=20)
    assert (
        why(jnp.float32) and why(jnp.float8_e4m3fn) and why(scales=numbers) and why(sinks=numbers)
    )
