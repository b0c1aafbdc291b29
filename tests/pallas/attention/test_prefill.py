"""prefill_attention against float64 attention, chunk by chunk; its kernel equals the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, attention_oracle, int32, kv_slots_of, normal, prompt_chunks

from benchmarks.measure.shapes import ATTENTION, AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.prefill import prefill_attention, prefill_attention_reference
from jaxspec.pallas.paging.kv_write import kv_write

KV_HEADS, HEADS, DIM, PAGE_SIZE = 2, 4, 8, 16
BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn

compiled = jax.jit(prefill_attention, static_argnums=2)
reference = jax.jit(prefill_attention_reference, static_argnums=2)


@pytest.mark.parametrize(
    ("slots", "lengths", "computed"),
    [
        ([1, 2, 3], [65, 1, 64], [0, 100, 7]),
        ([2, 1, 3], [0, 130, 3], [5, 0, 0]),
        ([3, 0, 10**6], [3, 40, 40], [0, 0, 0]),  # null and unknown slots: padding
        ([-1, 0, 0], [0, 0, 0], [9, 9, 9]),
    ],
)
def test_prefill_attention_equals_attention_over_the_history(slots, lengths, computed):
    rng = np.random.default_rng(sum(lengths))
    num_tokens, pages = 140, 10
    kv = jnp.full((2, 2, 1 + 3 * pages, PAGE_SIZE, KV_HEADS, DIM), jnp.nan)
    tables = np.zeros((4, pages), np.int32)
    tables[1:] = 1 + rng.permutation(3 * pages).reshape(3, pages)
    start = np.concatenate([[0], np.cumsum(lengths)])
    queries, expected = normal(rng, num_tokens, HEADS, DIM), np.zeros((num_tokens, HEADS, DIM))
    queries[start[-1] :] = np.nan
    for seq, slot in enumerate(slots):
        total = computed[seq] + lengths[seq]
        if not 0 < slot < 4 or not lengths[seq]:
            continue
        keys, values = normal(rng, total, KV_HEADS, DIM), normal(rng, total, KV_HEADS, DIM)
        kv_slots = kv_slots_of(tables[slot], PAGE_SIZE, total)
        kv = kv_write(kv, 1, jnp.asarray(keys), jnp.asarray(values), kv_slots)
        chunk = slice(start[seq], start[seq + 1])
        expected[chunk] = attention_oracle(queries[chunk], keys, values, computed[seq])
    chunks = prompt_chunks(slots, computed, start)
    out = compiled(jnp.asarray(queries), kv, 1, jnp.asarray(tables), chunks)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_8_bit_pools_are_read_as_they_are():
    queries, kv, *indices = kernel_case(
        AttentionShape(4, 2, 8), FP8, 16, [33, 1, 70, 3, 0], [0, 130, 70, 9, 50]
    )
    queries = queries.astype(jnp.float32)
    wide = compiled(queries, kv.astype(jnp.float32), 1, *indices)
    np.testing.assert_allclose(compiled(queries, kv, 1, *indices), wide, atol=1e-6)


def test_scaled_pools_are_read_as_the_products_of_numbers_and_scales():
    scales = jnp.asarray([0.375, 2.5])  # products with 8 bits are exact in float32
    queries, kv, *indices = kernel_case(
        AttentionShape(4, 2, 8), FP8, 16, [33, 1, 70, 3, 0], [0, 130, 70, 9, 50]
    )
    queries = queries.astype(jnp.float32)
    wide = kv.astype(jnp.float32) * scales[None, :, None, None, None, None]
    expected = compiled(queries, wide, 1, *indices)
    np.testing.assert_allclose(compiled(queries, kv, 1, *indices, scales), expected, atol=2e-6)


# The kernel.
SLOTS = np.array([3, 0, 2, 10**6, 1, 5, 4, -1], np.int32)
REAL, POISONED = (0, 2, 4, 5, 6), 5


def kernel_case(shape, dtype, page_size, lengths, computed, seed=0):
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
    return jnp.asarray(queries, BF16), jnp.asarray(kv, dtype), int32(tables), chunks


def check(run, queries, kv, tables, chunks, scales=None, sinks=None):
    """`run` equals the reference, and is 0 in padding; the poisoned chunk alone is NaN."""
    more = scales, sinks
    expected = np.asarray(reference(queries, kv, 1, tables, chunks, *more), np.float32)
    out = np.asarray(run(queries, kv, 1, tables, chunks, *more), np.float32)
    start, padding = np.asarray(chunks.query_start), np.ones(len(out), bool)
    for seq in REAL:
        chunk = slice(start[seq], start[seq + 1])
        padding[chunk] = False
        if seq == POISONED:
            assert np.isnan(out[chunk]).all()
            continue
        # Weights are rounded to 16 bits before they meet the values.
        tolerance = 4 * float(jnp.finfo(jnp.bfloat16).eps)
        tolerance *= 1 if scales is None else max(1, float(scales[1]))
        np.testing.assert_allclose(out[chunk], expected[chunk], atol=tolerance, rtol=0)
    assert not np.any(out[padding])


def interpreted(**params):
    """The op as its kernel in Mosaic's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.attention.prefill_kernel import prefill_attention_kernel

    options = {"block_kv": 64, "interpret": plgpu.InterpretGPUParams(**params)}

    def run(queries, kv, layer, tables, chunks, *more):
        layer = jnp.asarray(layer, jnp.int32)
        return prefill_attention_kernel(queries, kv, layer, tables, chunks, *more, **options)

    return run


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "page_size", "lengths", "computed"),
    [
        (BF16, 8, 2, 64, 16, [33, 1, 64, 3, 0], [0, 130, 70, 9, 50]),
        (BF16, 6, 1, 64, 24, [40, 1, 17, 3, 5], [3, 0, 63, 0, 190]),
        (BF16, 3, 1, 128, 64, [33, 0, 70, 3, 1], [0, 130, 60, 9, 127]),  # cut by tokens, not heads
        (BF16, 16, 1, 64, 544, [9, 1, 17, 3, 0], [0, 300, 120, 9, 50]),
        (BF16, 2, 1, 256, 16, [30, 1, 3, 3, 0], [70, 90, 34, 9, 50]),  # fewer tokens than a block's
        (FP8, 8, 2, 64, 16, [33, 1, 64, 3, 0], [0, 130, 190, 9, 50]),
        (FP8, 2, 1, 128, 24, [33, 0, 70, 3, 1], [0, 130, 60, 9, 127]),
        (FP8, 2, 1, 256, 16, [30, 1, 3, 3, 0], [70, 90, 34, 9, 50]),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    dtype, heads, kv_heads, dim, page_size, lengths, computed
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    run = interpreted(detect_races=True)
    shape = AttentionShape(heads, kv_heads, dim)
    check(run, *kernel_case(shape, dtype, page_size, lengths, computed))
    assert not get_races().races_found


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "page_size", "lengths", "computed"),
    [
        (BF16, 16, 2, 64, 16, [33, 1, 64, 3, 0], [0, 130, 70, 9, 50]),
        (BF16, 3, 1, 128, 64, [33, 0, 70, 3, 1], [0, 130, 60, 9, 127]),
        (FP8, 8, 2, 64, 16, [33, 1, 64, 3, 0], [0, 130, 190, 9, 50]),
    ],
)
def test_the_kernel_adds_sinks(dtype, heads, kv_heads, dim, page_size, lengths, computed):
    """Small ones, and one so large that it takes nearly all weight."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    sinks = normal(np.random.default_rng(2), heads)
    sinks[-1] = 30.0
    shape = AttentionShape(heads, kv_heads, dim)
    case = kernel_case(shape, dtype, page_size, lengths, computed)
    check(interpreted(detect_races=True), *case, sinks=jnp.asarray(sinks))
    assert not get_races().races_found


SCALES = jnp.asarray([0.3, 2.5], jnp.float32)


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "lengths", "computed"),
    [
        (8, 2, 64, 16, [33, 1, 64, 3, 0], [0, 130, 190, 9, 50]),
        (2, 1, 256, 16, [30, 1, 3, 3, 0], [70, 90, 34, 9, 50]),
    ],
)
def test_the_kernel_multiplies_by_the_scales_of_keys_and_values(
    heads, kv_heads, dim, page_size, lengths, computed
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    shape = AttentionShape(heads, kv_heads, dim)
    case = kernel_case(shape, FP8, page_size, lengths, computed)
    check(interpreted(detect_races=True), *case, SCALES)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.5-27b"])
def test_on_a_gpu_scaled_pools_are_read_by_the_kernel(model):
    dispatch._chosen.pop("prefill_attention", None)
    lengths, computed = [300, 1, 257, 3, 64], [0, 130, 700, 9, 1000]
    check(compiled, *kernel_case(ATTENTION[model], FP8, 16, lengths, computed), SCALES)
    assert dispatch.implementations()["prefill_attention"] == ("kernel",)


@pytest.mark.mosaic
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("computed", GARBAGE)
def test_live_chunks_out_of_range_harm_no_other(dtype, computed):
    """The first stands where no table reaches, the last ends where no tokens are."""
    shape, lengths = AttentionShape(2, 1, 64), [33, 1, 9, 3, 5]
    queries, kv, tables, chunks = kernel_case(shape, dtype, 16, lengths, [0, 130, 70, 9, 50])
    run = interpreted()
    expected = run(queries, kv, 1, tables, chunks)
    wild = dataclasses.replace(
        chunks,
        num_computed=chunks.num_computed.at[0].set(computed),
        query_start=chunks.query_start.at[7].set(2**31 - 1),
    )
    out = run(queries, kv, 1, tables, wild)
    others = slice(int(chunks.query_start[1]), int(chunks.query_start[6]))
    np.testing.assert_array_equal(*(x[others].astype(jnp.float32) for x in (out, expected)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "dtype", "page_size", "lengths", "computed"),
    [
        ("qwen3-8b", BF16, 16, [300, 1, 257, 3, 64], [0, 130, 700, 9, 1000]),
        ("qwen3.5-9b", BF16, 16, [300, 0, 257, 3, 64], [0, 130, 700, 9, 1000]),
        ("qwen3.5-27b", BF16, 544, [300, 1, 0, 3, 33], [0, 600, 700, 9, 511]),
        ("qwen3.5-35b-a3b", BF16, 64, [9, 1, 257, 3, 64], [0, 130, 1, 9, 64]),
        ("nemotron-3-nano", BF16, 24, [100, 1, 257, 3, 64], [0, 130, 2000, 9, 5]),
        ("llama-3.2-1b", BF16, 16, [513, 1, 257, 3, 64], [0, 127, 700, 9, 1000]),
        ("qwen3-8b", FP8, 16, [300, 1, 257, 3, 64], [0, 130, 700, 9, 1000]),
        ("qwen3.5-27b", FP8, 544, [300, 1, 0, 3, 33], [0, 600, 700, 9, 511]),
        ("llama-3.2-1b", FP8, 24, [513, 1, 257, 3, 64], [0, 127, 700, 9, 1000]),
    ],
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(
    model, dtype, page_size, lengths, computed
):
    dispatch._chosen.pop("prefill_attention", None)
    check(compiled, *kernel_case(ATTENTION[model], dtype, page_size, lengths, computed))
    assert dispatch.implementations()["prefill_attention"] == ("kernel",)
