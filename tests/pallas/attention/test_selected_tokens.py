"""Attention by a kernel to the tokens that an index selects: it equals attention with a mask.

In place of the kernel runs its reference, which defines the kernel's result.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE
from pairwise import soak
from selected_cases import (
    LAYER,
    SLOTS,
    Sizes,
    check_rows,
    check_tokens,
    decode_case,
    prompt_case,
)

from jaxspec.pallas import dispatch, row_tiles
from jaxspec.pallas.attention import latent, selected_tokens, wide_kernel
from jaxspec.pallas.attention.latent import (
    latent_attention_reference,
    latent_prefill_attention_reference,
)
from jaxspec.pallas.attention.token_index import TokenIndex

SIZES = Sizes(heads=6, rank=8, shared=4, page_size=4, table=25)  # up to 100 tokens per row
OPTIONS = {"value_dim": 8, "scale": 0.3}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Run the ops with their kernels, in whose place is the reference; return their calls."""
    calls = []

    def kernel(queries, latents, layer, page_tables, rows, **sizes):
        calls.append(page_tables.shape)
        return latent_attention_reference(queries, latents, layer, page_tables, rows, **sizes)

    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, _, rows: "latent" in op)
    monkeypatch.setattr(wide_kernel, "latent_attention_kernel", kernel)
    return calls


@functools.partial(jax.jit, static_argnames=("is_prefill", "is_reference"))
def attended(operands, index, *, is_prefill=False, is_reference=False):
    queries, latents, *others = operands
    op = {
        (False, False): latent.latent_attention,
        (False, True): latent_attention_reference,
        (True, False): latent.latent_prefill_attention,
        (True, True): latent_prefill_attention_reference,
    }[is_prefill, is_reference]
    return op(queries, latents, LAYER, *others, index=index, **OPTIONS)


@pytest.mark.parametrize(
    ("top_k", "width"), [(5, 4), (64, 1), (70, 4), soak(5, 1), soak(99, 4), soak(100, 1)]
)
@pytest.mark.parametrize("lengths", [(100, 1, 50), (4, 1, 5), (64, 71, 70)])
def test_rows_attend_to_the_selected_tokens(lengths, top_k, width):
    """Contexts shorter and longer than top_k, padding, equal scores, pages of garbage."""
    operands, index = decode_case(SIZES, lengths, width, top_k)
    expected = attended(operands, index, is_reference=True)
    check_rows(attended(operands, index), expected, operands[-1], tolerance=2e-6)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_are_gathered_in_pieces_of_bounded_size(rows, monkeypatch, kernels):
    """Six rows in six pieces, and in two pieces of three."""
    operands, index = decode_case(SIZES, (100, 1, 50), 4, 5)
    expected = attended(operands, index, is_reference=True)
    of_row = 4 * selected_tokens._gathered_bytes(operands[1], index)
    monkeypatch.setattr(selected_tokens, "_GATHERED_OF_ROWS", rows * of_row)
    attended.clear_cache()
    kernels.clear()
    try:
        out = attended(operands, index)
    finally:
        attended.clear_cache()  # traces with this bound
    check_rows(out, expected, operands[-1], tolerance=2e-6)
    gathered = [tables[0] - 1 for tables in kernels if tables != (6, SIZES.table)]
    assert gathered == {1: [4] * 6, 4: [12] * 2}[rows]


@pytest.mark.parametrize("spoils_keys", [False, True])
def test_a_rejected_draft_that_is_nan_changes_no_token_before_it(spoils_keys):
    operands, index = decode_case(SIZES, (100, 1, 50), 4, 5)
    queries, latents, tables, rows = operands
    whole = np.asarray(attended(operands, index))
    place, offset = divmod(int(rows.num_computed[0]) + 2, SIZES.page_size)
    at = LAYER, tables[SLOTS[0], place], offset
    spoiled = dataclasses.replace(index, keys=index.keys.at[at].set(jnp.nan))
    index = spoiled if spoils_keys else index
    out = np.asarray(attended((queries, latents.at[at].set(jnp.nan), tables, rows), index))
    np.testing.assert_array_equal(out[0, :2], whole[0, :2])
    np.testing.assert_array_equal(out[1:], whole[1:])


@pytest.mark.parametrize("num_computed", GARBAGE)
def test_a_live_row_out_of_range_harms_no_other(num_computed):
    operands, index = decode_case(SIZES, (100, 1, 50), 4, 5)
    expected = np.asarray(attended(operands, index))
    *others, rows = operands
    wild = dataclasses.replace(
        rows,
        num_computed=rows.num_computed.at[5].set(num_computed),
        query_len=rows.query_len.at[5].set(2**31 - 1),
    )
    out = np.asarray(attended((*others, wild), index))
    np.testing.assert_array_equal(out[:5], expected[:5])


def test_the_plain_kernel_runs_where_all_tokens_are_selected(kernels):
    """In a table of no more positions than top_k, whatever the rows; else if all rows are short."""
    attended.clear_cache()
    operands, index = decode_case(SIZES, (100, 1, 50), 1, 100)
    attended(operands, index)
    assert kernels == [(6, SIZES.table)]
    kernels.clear()
    operands, index = decode_case(SIZES, (30, 1, 40), 1, 70)
    plain = attended(operands, None)
    assert kernels == [(6, SIZES.table)]
    np.testing.assert_array_equal(attended(operands, index), plain)
    assert kernels == [(6, SIZES.table), (6, SIZES.table), (7, 2)]


def test_a_deterministic_engine_does_not_choose_by_the_rows(kernels):
    attended.clear_cache()
    operands, index = decode_case(SIZES, (30, 1, 40), 1, 70)
    with row_tiles.deterministic():
        out = attended(operands, index)
    assert kernels == [(7, 2)]
    attended.clear_cache()
    expected = attended(operands, index, is_reference=True)
    check_rows(out, expected, operands[-1], tolerance=2e-6)


@pytest.mark.parametrize(
    ("lengths", "computed", "top_k", "tile"),
    [
        ((70, 1, 33), (30, 0, 60), 5, 64),
        ((5, 3, 1), (0, 2, 70), 70, 3),
        soak((70, 1, 33), (30, 0, 60), 70, 3),
        soak((5, 3, 1), (0, 2, 70), 64, 64),
    ],
)
def test_prompts_attend_to_the_selected_tokens(lengths, computed, top_k, tile, monkeypatch):
    """Chunks longer than a tile, after a cached prefix, padding between and after them."""
    monkeypatch.setattr(selected_tokens, "_TILE", tile)
    attended.clear_cache()
    operands, index, real = prompt_case(SIZES, lengths, computed, top_k)
    expected = attended(operands, index, is_prefill=True, is_reference=True)
    check_tokens(attended(operands, index, is_prefill=True), expected, real, tolerance=2e-6)


def test_the_vectors_of_a_piece_of_a_prompt_have_at_most_256_mb():
    for top_k, features, tokens in ((2048, 576, 64), (16384, 576, 14), (2**20, 576, 1)):
        index = TokenIndex(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()), top_k)
        pool = jax.ShapeDtypeStruct((1, 1, 16, features), jnp.bfloat16)
        assert selected_tokens.tokens_at_once(pool, index) == tokens


def test_the_vectors_of_rows_have_at_most_1_gb():
    for width, rows in ((1, 455), (4, 113), (512, 1)):
        index = TokenIndex(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()), 2048)
        pool = jax.ShapeDtypeStruct((1, 1, 16, 576), jnp.bfloat16)
        assert selected_tokens.rows_at_once(pool, index, width) == rows
