"""prefill_attention against float64 attention, chunk by chunk; its kernel equals the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, attention_oracle, kv_slots_of, normal, prompt_chunks
from prompt_cases import check_prompts, prompt_case

from benchmarks.measure.shapes import ATTENTION, WIDE_ATTENTION, AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.chunk_rows import attend_by_rows
from jaxspec.pallas.attention.paged import WIDE
from jaxspec.pallas.attention.prefill import prefill_attention, prefill_attention_reference
from jaxspec.pallas.paging.kv_write import kv_write

KV_HEADS, HEADS, DIM, PAGE_SIZE = 2, 4, 8, 16
BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn

compiled = jax.jit(prefill_attention, static_argnums=2)
reference = jax.jit(prefill_attention_reference, static_argnums=2)


@pytest.mark.few(2)
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
    queries, kv, *indices = prompt_case(
        AttentionShape(4, 2, 8), FP8, 16, [33, 1, 70, 3, 0], [0, 130, 70, 9, 50]
    )
    queries = queries.astype(jnp.float32)
    wide = compiled(queries, kv.astype(jnp.float32), 1, *indices)
    np.testing.assert_allclose(compiled(queries, kv, 1, *indices), wide, atol=1e-6)


def test_scaled_pools_are_read_as_the_products_of_numbers_and_scales():
    scales = jnp.asarray([0.375, 2.5])  # products with 8 bits are exact in float32
    queries, kv, *indices = prompt_case(
        AttentionShape(4, 2, 8), FP8, 16, [33, 1, 70, 3, 0], [0, 130, 70, 9, 50]
    )
    queries = queries.astype(jnp.float32)
    wide = kv.astype(jnp.float32) * scales[None, :, None, None, None, None]
    expected = compiled(queries, wide, 1, *indices)
    np.testing.assert_allclose(compiled(queries, kv, 1, *indices, scales), expected, atol=2e-6)


# The kernel.


def check(run, queries, kv, tables, chunks, scales=None, sinks=None):
    """`run` equals the reference."""
    operands = queries, kv, 1, tables, chunks, scales, sinks
    # Weights are rounded to 16 bits before they meet the values.
    tolerance = 4 * float(jnp.finfo(jnp.bfloat16).eps)
    tolerance *= 1 if scales is None else max(1, float(scales[1]))
    check_prompts(run(*operands), reference(*operands), chunks, tolerance)


def interpreted(**params):
    """The op as its kernel in Mosaic's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.attention.prefill_kernel import prefill_attention_kernel
    from jaxspec.pallas.attention.wide_kernel import wide_attention_kernel

    options = {"block_kv": 64, "interpret": plgpu.InterpretGPUParams(**params)}

    def run(queries, kv, layer, tables, chunks, *more):
        layer = jnp.asarray(layer, jnp.int32)
        if queries.shape[2] != WIDE:
            return prefill_attention_kernel(queries, kv, layer, tables, chunks, *more, **options)

        def attend(queries, rows):
            interpret = options["interpret"]
            return wide_attention_kernel(queries, kv, layer, tables, rows, interpret=interpret)

        group = queries.shape[1] // kv.shape[4]
        return attend_by_rows(attend, queries, chunks, len(tables), group)

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
        (BF16, 16, 2, 512, 16, [19, 1, 8, 3, 0], [0, 40, 7, 9, 50]),
        (BF16, 4, 1, 512, 24, [17, 0, 33, 3, 1], [0, 40, 31, 9, 63]),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    dtype, heads, kv_heads, dim, page_size, lengths, computed
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    run = interpreted(detect_races=True)
    shape = AttentionShape(heads, kv_heads, dim)
    check(run, *prompt_case(shape, dtype, page_size, lengths, computed))
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
    case = prompt_case(shape, dtype, page_size, lengths, computed)
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
    case = prompt_case(shape, FP8, page_size, lengths, computed)
    check(interpreted(detect_races=True), *case, SCALES)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.5-27b"])
def test_on_a_gpu_scaled_pools_are_read_by_the_kernel(model):
    dispatch._chosen.pop("prefill_attention", None)
    lengths, computed = [300, 1, 257, 3, 64], [0, 130, 700, 9, 1000]
    check(compiled, *prompt_case(ATTENTION[model], FP8, 16, lengths, computed), SCALES)
    assert dispatch.implementations()["prefill_attention"] == ("kernel",)


@pytest.mark.mosaic
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("computed", GARBAGE)
def test_live_chunks_out_of_range_harm_no_other(dtype, computed):
    """The first stands where no table reaches, the last ends where no tokens are."""
    shape, lengths = AttentionShape(2, 1, 64), [33, 1, 9, 3, 5]
    queries, kv, tables, chunks = prompt_case(shape, dtype, 16, lengths, [0, 130, 70, 9, 50])
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
        ("gemma-4-26b-a4b", BF16, 16, [300, 1, 257, 3, 64], [0, 130, 700, 9, 1000]),
        ("gemma-4-e4b", BF16, 64, [300, 0, 257, 3, 64], [0, 130, 700, 9, 1000]),
    ],
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(
    model, dtype, page_size, lengths, computed
):
    dispatch._chosen.pop("prefill_attention", None)
    shape = (ATTENTION | WIDE_ATTENTION)[model]
    check(compiled, *prompt_case(shape, dtype, page_size, lengths, computed))
    assert dispatch.implementations()["prefill_attention"] == ("kernel",)
