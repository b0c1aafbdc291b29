"""The kernel of attention over latents equals its references: interpreted, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, decode_rows, normal
from prompt_cases import check_prompts, prompt_case

from benchmarks.measure.shapes import AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.chunk_rows import attend_by_rows
from jaxspec.pallas.attention.latent import (
    latent_attention,
    latent_attention_reference,
    latent_prefill_attention,
    latent_prefill_attention_reference,
)

# Padding by slot, by length, and by slots that do not exist; the other rows are REAL.
SLOTS = np.array([3, 0, 4, 10**6, 1, 5], np.int32)
REAL = (0, 4, 5)
SHARED, SCALE = 64, 0.07

reference = jax.jit(
    latent_attention_reference, static_argnums=2, static_argnames=("value_dim", "scale")
)


def kernel_case(heads, rank, width, page_size, table_width, seed=0):
    """Queries, pool, page tables and rows.

    NaN stands in every padding token and in all that no row wrote. Row 0 fills its table, row 4
    begins, and row 5 ends within a page. Entries of tables that no row may use are out of range.
    """
    rng = np.random.default_rng(seed)
    capacity, pages = table_width * page_size, 3 * table_width + 1
    query_len = np.array([width, width, 0, width, 1, max(1, width - 1)], np.int32)
    length = np.array([capacity, 5, 5, 5, 1, capacity // 2 + 3])
    num_computed = np.maximum(length - query_len, 0).astype(np.int32)
    tables = rng.choice(GARBAGE, size=(6, table_width)).astype(np.int32)
    free = list(1 + rng.permutation(pages - 1))
    pool = np.full((2, pages, page_size, rank + SHARED), np.nan, np.float32)
    for row in REAL:
        for index in range(-(-(num_computed[row] + query_len[row]) // page_size)):
            tables[SLOTS[row], index] = page = free.pop()
            end = min(page_size, num_computed[row] + query_len[row] - index * page_size)
            pool[1, page, :end] = normal(rng, end, rank + SHARED)
    queries = normal(rng, len(SLOTS), width, heads, rank + SHARED)
    for row in range(len(SLOTS)):
        queries[row, query_len[row] if row in REAL else 0 :] = np.nan
    rows = decode_rows(SLOTS, num_computed, query_len)
    bfloat16 = jnp.bfloat16
    return jnp.asarray(queries, bfloat16), jnp.asarray(pool, bfloat16), jnp.asarray(tables), rows


def check(run, queries, pool, tables, rows, rank):
    """`run` equals the reference, and is 0 in padding rows and tokens."""
    sizes = {"value_dim": rank, "scale": SCALE}
    expected = np.asarray(reference(queries, pool, 1, tables, rows, **sizes), np.float32)
    out = np.asarray(run(queries, pool, 1, tables, rows, **sizes), np.float32)
    query_len = np.asarray(rows.query_len)
    for row in range(len(out)):
        real = query_len[row] if row in REAL else 0
        assert not np.any(out[row, real:])
        np.testing.assert_allclose(out[row, :real], expected[row, :real], atol=0.04, rtol=0)


def interpreted(splits, **params):
    """The op as its kernel in Mosaic's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.attention.wide_kernel import latent_attention_kernel

    options = {"splits": splits, "interpret": plgpu.InterpretGPUParams(**params)}

    def run(queries, pool, layer, tables, rows, **sizes):
        layer = jnp.asarray(layer, jnp.int32)
        return latent_attention_kernel(queries, pool, layer, tables, rows, **sizes, **options)

    return run


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("heads", "rank", "width", "page_size", "table_width", "splits"),
    [
        (16, 128, 4, 16, 14, 1),  # a tile of one row's tokens
        (32, 128, 3, 24, 9, 2),  # several tiles, the last not full
        (128, 128, 1, 64, 4, 3),
        (16, 256, 2, 544, 1, 2),
        (16, 512, 1, 16, 9, 1),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    heads, rank, width, page_size, table_width, splits
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    run = interpreted(splits, detect_races=True)
    check(run, *kernel_case(heads, rank, width, page_size, table_width), rank)
    assert not get_races().races_found


def check_chunks(run, heads, rank, *case):
    """`run` of prompt chunks equals the reference."""
    shape, sizes = AttentionShape(heads, 1, rank + SHARED), {"value_dim": rank, "scale": SCALE}
    queries, kv, tables, chunks = prompt_case(shape, jnp.bfloat16, *case)
    operands = queries, kv[:, 0, ..., 0, :], 1, tables, chunks
    expected = jax.jit(
        functools.partial(latent_prefill_attention_reference, **sizes), static_argnums=2
    )(*operands)
    check_prompts(run(*operands, **sizes), expected, chunks, tolerance=0.04)


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("heads", "rank", "page_size", "lengths", "computed"),
    [
        (16, 128, 16, [33, 1, 8, 3, 0], [0, 40, 30, 9, 50]),  # rows of 4 tokens
        (20, 128, 24, [17, 0, 16, 3, 1], [0, 40, 63, 9, 64]),  # of 16, several tiles each
        (128, 128, 64, [3, 1, 1, 3, 2], [0, 40, 63, 9, 126]),  # of one
    ],
)
def test_the_kernel_attends_to_prompts_without_races(heads, rank, page_size, lengths, computed):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    kernel = interpreted(None, detect_races=True)

    def run(queries, pool, layer, tables, chunks, **sizes):
        def attend(queries, rows):
            return kernel(queries, pool, layer, tables, rows, **sizes)

        return attend_by_rows(attend, queries, chunks, len(tables), heads)

    check_chunks(run, heads, rank, page_size, lengths, computed)
    assert not get_races().races_found


@pytest.mark.mosaic
def test_a_draft_that_is_nan_changes_no_token_before_it():
    queries, pool, tables, rows = kernel_case(16, 128, 4, 16, 9)
    sizes, run = {"value_dim": 128, "scale": SCALE}, interpreted(2)
    sound = np.asarray(run(queries, pool, 1, tables, rows, **sizes), np.float32)
    place, offset = divmod(int(rows.num_computed[0]) + 2, 16)
    failed = pool.at[1, tables[SLOTS[0], place], offset].set(jnp.nan)
    out = np.asarray(run(queries, failed, 1, tables, rows, **sizes), np.float32)
    np.testing.assert_array_equal(out[0, :2], sound[0, :2])
    assert np.isnan(out[0, 2:]).all()
    np.testing.assert_array_equal(out[4:], sound[4:])


@pytest.mark.mosaic
@pytest.mark.parametrize("num_computed", GARBAGE)
def test_a_live_row_out_of_range_harms_no_other(num_computed):
    queries, pool, tables, rows = kernel_case(16, 128, 2, 16, 4)
    sizes, run = {"value_dim": 128, "scale": SCALE}, interpreted(2)
    expected = np.asarray(run(queries, pool, 1, tables, rows, **sizes), np.float32)
    wild = dataclasses.replace(
        rows,
        num_computed=rows.num_computed.at[5].set(num_computed),
        query_len=rows.query_len.at[5].set(2**31 - 1),
    )
    out = np.asarray(run(queries, pool, 1, tables, wild, **sizes), np.float32)
    np.testing.assert_array_equal(out[:5], expected[:5])


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width"), [(128, 1), (128, 4), (32, 1), (16, 8)])
def test_on_a_gpu_the_kernel_equals_its_reference(heads, width):
    dispatch._chosen.pop("latent_attention", None)
    run = jax.jit(latent_attention, static_argnums=2, static_argnames=("value_dim", "scale"))
    check(run, *kernel_case(heads, 512, width, 16, 40), 512)
    assert dispatch.implementations()["latent_attention"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 20])
def test_on_a_gpu_prompts_have_the_kernel(heads):
    dispatch._chosen.pop("latent_prefill_attention", None)
    sizes = "value_dim", "scale"
    run = jax.jit(latent_prefill_attention, static_argnums=2, static_argnames=sizes)
    check_chunks(run, heads, 512, 16, [300, 1, 257, 3, 64], [0, 130, 700, 9, 1000])
    assert dispatch.implementations()["latent_prefill_attention"] == ("kernel",)
