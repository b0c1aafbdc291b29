"""Prompt chunks for kernels of attention, with NaN in all that they must not read."""

import jax.numpy as jnp
import numpy as np
from attention import GARBAGE, int32, prompt_chunks

SLOTS = np.array([3, 0, 2, 10**6, 1, 5, 4, -1], np.int32)
REAL, POISONED = (0, 2, 4, 5, 6), 5


def prompt_case(shape, dtype, page_size, lengths, computed, seed=0):
    """Queries, pool, page tables and chunks.

    `lengths` and `computed` are those of the chunks in REAL; the others have 7 tokens each, and the
    last 5 tokens belong to none. NaN stands in all tokens that are padding, in all that nobody
    wrote, and in a key of chunk POISONED. Entries of the tables that no chunk may use are out of
    range.
    """
    rng = np.random.default_rng(seed)
    count, before = np.full(len(SLOTS), 7), rng.choice(GARBAGE, len(SLOTS))
    count[list(REAL)], before[list(REAL)] = lengths, computed
    start = np.concatenate([[0], np.cumsum(count)])
    ends = [a + b for a, b in zip(lengths, computed, strict=True)]
    table_width = max(-(-end // page_size) for end in ends) + 1
    pages = table_width * len(REAL) + 1
    tables, free = rng.choice(GARBAGE, (6, table_width)), list(1 + rng.permutation(pages - 1))
    kv = np.full((2, 2, pages, page_size, shape.kv_heads, shape.head_dim), np.nan, np.float32)
    queries = np.full((start[-1] + 5, shape.heads, shape.head_dim), np.nan, np.float32)
    for seq in REAL:
        total = before[seq] + count[seq]
        queries[start[seq] : start[seq + 1]] = rng.normal(size=(count[seq], *queries.shape[1:]))
        for index in range(-(-total // page_size) if count[seq] else 0):
            tables[SLOTS[seq], index] = page = free.pop()
            end = min(page_size, total - index * page_size)
            kv[1, :, page, :end] = rng.normal(size=(2, end, *kv.shape[4:]))
            if seq == POISONED and index == 0:
                kv[1, 0, page, 0] = np.nan
    chunks = prompt_chunks(SLOTS, before, start)
    return jnp.asarray(queries, jnp.bfloat16), jnp.asarray(kv, dtype), int32(tables), chunks


def check_prompts(out, expected, chunks, tolerance):
    """`out` equals `expected`, and is 0 in padding; the poisoned chunk alone is NaN."""
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    start, padding = np.asarray(chunks.query_start), np.ones(len(out), bool)
    for seq in REAL:
        chunk = slice(start[seq], start[seq + 1])
        padding[chunk] = False
        if seq == POISONED:
            assert np.isnan(out[chunk]).all()
            continue
        np.testing.assert_allclose(out[chunk], expected[chunk], atol=tolerance, rtol=0)
    assert not np.any(out[padding])
