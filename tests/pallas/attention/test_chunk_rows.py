"""Prompts as decode rows: attention by rows equals that of the prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE
from prompt_cases import check_prompts, prompt_case

from benchmarks.measure.shapes import AttentionShape
from jaxspec.pallas.attention.chunk_rows import attend_by_rows
from jaxspec.pallas.attention.paged import paged_attention_reference
from jaxspec.pallas.attention.prefill import prefill_attention_reference

reference = jax.jit(prefill_attention_reference, static_argnums=2)


@jax.jit
def by_rows(queries, kv, tables, chunks):
    def attend(queries, rows):
        return paged_attention_reference(queries, kv, 1, tables, rows)

    return attend_by_rows(attend, queries, chunks, len(tables), queries.shape[1] // kv.shape[4])


@pytest.mark.parametrize("heads", [1, 4, 6, 64])  # rows of 64, 16, 32 and 1 tokens
@pytest.mark.parametrize(
    ("lengths", "computed"),
    [([33, 1, 64, 3, 0], [0, 130, 70, 9, 50]), ([1, 16, 32, 17, 65], [5, 0, 0, 100, 31])],
)
def test_attention_by_rows_equals_that_of_prompts(heads, lengths, computed):
    """Padding holds anything: it gets zeros."""
    queries, kv, tables, chunks = prompt_case(
        AttentionShape(heads, 1, 8), jnp.float32, 16, lengths, computed
    )
    queries = queries.astype(jnp.float32)
    out = by_rows(queries, kv, tables, chunks)
    check_prompts(out, reference(queries, kv, 1, tables, chunks), chunks, tolerance=2e-6)


@pytest.mark.parametrize("computed", GARBAGE)
def test_a_chunk_out_of_range_harms_no_other(computed):
    lengths, before = [33, 1, 9, 3, 5], [0, 130, 70, 9, 50]
    shape = AttentionShape(4, 1, 8)
    queries, kv, tables, chunks = prompt_case(shape, jnp.float32, 16, lengths, before)
    wild = chunks.replace(
        num_computed=chunks.num_computed.at[0].set(computed),
        query_start=chunks.query_start.at[7].set(2**31 - 1),
    )
    queries = queries.astype(jnp.float32)
    out, expected = (by_rows(queries, kv, tables, each) for each in (wild, chunks))
    others = slice(int(chunks.query_start[1]), int(chunks.query_start[6]))
    np.testing.assert_array_equal(out[others], expected[others])
