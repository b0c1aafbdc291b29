"""Rows and prompts whose tokens attend to those that a token index selects."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from attention import GARBAGE, decode_rows, int32, normal, prompt_chunks

from jaxspec.pallas.attention.token_index import TokenIndex

LAYERS, LAYER = 2, 1
# Padding by slot, by length, and by slots that do not exist; the other rows are REAL.
SLOTS, REAL = np.array([3, 0, 4, 10**6, 1, 5], np.int32), (0, 4, 5)
_WEIGHTS = -1.0, -0.5, 0.0, 0.5, 1.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    heads: int
    rank: int
    shared: int
    page_size: int
    table: int  # pages per row
    index_heads: int = 3
    index_dim: int = 5
    dtype: str = "float32"

    @property
    def features(self):
        return self.rank + self.shared

    def array(self, x):
        return jnp.asarray(x, self.dtype)


def pools_of(sizes, rng, lengths, slots):
    """Latents, keys of the index, and page tables of slots with so many tokens.

    NaN is in all that no row wrote. Entries of tables that no row may use are out of range. Keys
    are of few numbers, so many scores are equal and all are exact.
    """
    pages, page_size = len(slots) * sizes.table + 1, sizes.page_size
    tables = rng.choice(GARBAGE, (6, sizes.table)).astype(np.int32)
    latents = np.full((LAYERS, pages, page_size, sizes.features), np.nan, np.float32)
    keys = np.full((LAYERS, pages, page_size, sizes.index_dim), np.nan, np.float32)
    free = list(1 + rng.permutation(pages - 1))
    for length, slot in zip(lengths, slots, strict=True):
        for first in range(0, length, page_size):
            tables[slot, first // page_size] = page = free.pop()
            count = min(page_size, length - first)
            latents[LAYER, page, :count] = normal(rng, count, sizes.features)
            keys[LAYER, page, :count] = rng.integers(-1, 2, (count, sizes.index_dim))
    return sizes.array(latents), sizes.array(keys), int32(tables)


def index_of(sizes, rng, keys, top_k, *tokens):
    queries = rng.integers(-1, 2, (*tokens, sizes.index_heads, sizes.index_dim))
    weights = rng.choice(_WEIGHTS, (*tokens, sizes.index_heads)).astype(np.float32)
    return TokenIndex(sizes.array(queries), jnp.asarray(weights), keys, top_k)


def decode_case(sizes, lengths, width, top_k, seed=0):
    """Operands of the rows SLOTS, and the index; the REAL rows have so many tokens."""
    rng = np.random.default_rng(seed)
    query_len = np.array([width, width, 0, width, 1, max(1, width - 1)], np.int32)
    computed = rng.choice(GARBAGE, len(SLOTS)).astype(np.int32)
    computed[list(REAL)] = np.array(lengths) - query_len[list(REAL)]
    latents, keys, tables = pools_of(sizes, rng, lengths, SLOTS[list(REAL)])
    queries = normal(rng, len(SLOTS), width, sizes.heads, sizes.features)
    for row in range(len(SLOTS)):
        queries[row, query_len[row] if row in REAL else 0 :] = np.nan
    operands = sizes.array(queries), latents, tables, decode_rows(SLOTS, computed, query_len)
    return operands, index_of(sizes, rng, keys, top_k, len(SLOTS), width)


def check_rows(out, expected, rows, tolerance):
    """`out` equals `expected`, and is 0 in padding."""
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    query_len = np.asarray(rows.query_len)
    for row in range(len(out)):
        real = query_len[row] if row in REAL else 0
        assert np.isfinite(out[row, :real]).all() and not np.any(out[row, real:])
        np.testing.assert_allclose(out[row], expected[row], atol=tolerance, rtol=0)


def prompt_case(sizes, lengths, computed, top_k, seed=0):
    """Operands, index, and the tokens that are no padding, of three chunks with such lengths."""
    rng, slots = np.random.default_rng(seed), [1, 0, 2, 10**6, 3]
    counts = [lengths[0], 4, lengths[1], 4, lengths[2], 5]
    before = [computed[0], GARBAGE[0], computed[1], 3, computed[2]]
    starts = np.concatenate([[0], np.cumsum(counts[:-1])])
    real = np.repeat([True, False, True, False, True, False], counts)
    ends = [a + b for a, b in zip(lengths, computed, strict=True)]
    latents, keys, tables = pools_of(sizes, rng, ends, [1, 2, 3])
    queries = normal(rng, len(real), sizes.heads, sizes.features)
    queries[~real] = np.nan
    operands = sizes.array(queries), latents, tables, prompt_chunks(slots, before, starts)
    return operands, index_of(sizes, rng, keys, top_k, len(real)), real


def check_tokens(out, expected, real, tolerance):
    """`out` equals `expected`, and is 0 in padding."""
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    np.testing.assert_allclose(out, expected, atol=tolerance, rtol=0)
    assert np.isfinite(out).all() and not np.any(out[~real])
