"""The kernel of paged_attention equals its reference: in Mosaic's interpreter, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, decode_rows, normal

from benchmarks.measure.shapes import ATTENTION, WIDE_ATTENTION, AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.paged import WIDE, paged_attention, paged_attention_reference
from jaxspec.pallas.attention.paged_tiling import Tiling

LAYERS = 2
SHAPES = ATTENTION | WIDE_ATTENTION
# Padding by slot, by length, and by slots that do not exist; the other rows are REAL.
SLOTS = np.array([3, 0, 4, 10**6, -1, 1, 5, 2], np.int32)
REAL, POISONED = (0, 5, 6, 7), 6

reference = jax.jit(paged_attention_reference, static_argnums=2)


def gate_of(rng, queries):
    """A gate for these queries, with columns behind it that are none."""
    rows, width, heads, dim = queries.shape
    projected = 2 * normal(rng, rows * width, 2 * (heads + 1) * dim)
    return OutputGate(jnp.asarray(projected, queries.dtype))


def kernel_case(shape, dtype, width, page_size, table_width, seed=0):
    """Queries, pool, page tables and rows.

    NaN stands in every padding token, in all that no row wrote, and in a key of row POISONED. Row 0
    fills its table; row 5 begins; rows 6 and 7 end within a page. Entries of the tables that no row
    may use are out of range.
    """
    rng = np.random.default_rng(seed)
    capacity, pages = table_width * page_size, 4 * table_width + 1
    query_len = np.array([width, width, 0, width, width, 1, max(1, width - 1), width], np.int32)
    length = np.array([capacity, 5, 5, 5, 5, 1, capacity // 2 + 3, capacity - page_size - 7])
    num_computed = np.maximum(length - query_len, 0).astype(np.int32)
    tables = rng.choice(GARBAGE, size=(6, table_width)).astype(np.int32)
    free = list(1 + rng.permutation(pages - 1))
    kv = np.full((LAYERS, 2, pages, page_size, shape.kv_heads, shape.head_dim), np.nan, np.float32)
    for row in REAL:
        for index in range(-(-(num_computed[row] + query_len[row]) // page_size)):
            tables[SLOTS[row], index] = page = free.pop()
            end = min(page_size, num_computed[row] + query_len[row] - index * page_size)
            kv[1, :, page, :end] = normal(rng, 2, end, shape.kv_heads, shape.head_dim)
            if row == POISONED and index == 0:
                kv[1, 0, page, 0] = np.nan
    queries = normal(rng, len(SLOTS), width, shape.heads, shape.head_dim)
    for row in range(len(SLOTS)):
        queries[row, query_len[row] if row in REAL else 0 :] = np.nan
    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    rows = decode_rows(SLOTS, num_computed, query_len)
    return jnp.asarray(queries, wide), jnp.asarray(kv, dtype), jnp.asarray(tables), rows


def check(run, queries, kv, tables, rows, gate=None, scales=None, sinks=None):
    """`run` equals the reference, and is 0 in padding rows and tokens."""
    expected = reference(queries, kv, 1, tables, rows, scales, sinks)
    if gate is not None:
        shape = expected.shape
        expected = gate(expected.astype(jnp.float32).reshape(-1, *shape[2:])).reshape(shape)
    expected = np.asarray(expected, np.float32)
    out = np.asarray(run(queries, kv, 1, tables, rows, gate, scales, sinks), np.float32)
    query_len = np.asarray(rows.query_len)
    for row in range(len(out)):
        real = query_len[row] if row in REAL else 0
        assert not np.any(out[row, real:])
        if row == POISONED:
            assert np.isnan(out[row, :real]).all()
            continue
        # Weights are rounded to 16 bits before they meet the values.
        tolerance = 4e-6 if kv.dtype == jnp.float32 else 4 * float(jnp.finfo(jnp.bfloat16).eps)
        tolerance *= 1 if scales is None else max(1, float(scales[1]))
        np.testing.assert_allclose(out[row, :real], expected[row, :real], atol=tolerance, rtol=0)


def with_failed_drafts(case, first_failed):
    """The case with NaN in the keys and values of all rows from their draft `first_failed` on."""
    queries, kv, tables, rows = case
    page_size = kv.shape[3]
    for row in REAL:
        for draft in range(first_failed, int(rows.query_len[row])):
            page, offset = divmod(int(rows.num_computed[row]) + draft, page_size)
            nan = jnp.full((), jnp.nan, kv.dtype)
            kv = kv.at[1, :, tables[SLOTS[row], page], offset].set(nan)
    return queries, kv, tables, rows


def check_failed_drafts(run, case, first_failed):
    """Tokens before a draft that is NaN are what they were; those from it on are NaN."""
    query_len = np.asarray(case[-1].query_len)
    sound, failed = (
        np.asarray(run(queries, kv, 1, *rest), np.float32)
        for queries, kv, *rest in (case, with_failed_drafts(case, first_failed))
    )
    for row in REAL:
        before = failed[row, : min(first_failed, query_len[row])]
        np.testing.assert_array_equal(before, sound[row, : len(before)])
        assert np.isnan(failed[row, first_failed : query_len[row]]).all()


def interpreted(tiling, **params):
    """The op as its kernel in Mosaic's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.attention.paged_kernel import paged_attention_kernel
    from jaxspec.pallas.attention.wide_kernel import wide_attention_kernel

    interpret = plgpu.InterpretGPUParams(**params)

    def run(queries, kv, layer, tables, rows, *more):
        layer = jnp.asarray(layer, jnp.int32)
        if queries.shape[3] == WIDE:
            options = {"splits": tiling.splits, "interpret": interpret}
            return wide_attention_kernel(queries, kv, layer, tables, rows, **options)
        options = {"tiling": tiling, "interpret": interpret}
        return paged_attention_kernel(queries, kv, layer, tables, rows, *more, **options)

    return run


def tiling_of(dtype, splits, stages=2):
    return Tiling(block_kv=32 if dtype == jnp.float32 else 64, stages=stages, splits=splits)


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "width", "page_size", "table_width", "splits"),
    [
        (jnp.bfloat16, 4, 2, 64, 4, 16, 14, 1),
        (jnp.bfloat16, 4, 2, 64, 3, 24, 9, 2),
        (jnp.bfloat16, 2, 1, 128, 1, 64, 4, 3),
        (jnp.bfloat16, 16, 1, 64, 9, 16, 9, 1),  # several query tiles
        (jnp.bfloat16, 2, 1, 256, 2, 544, 1, 7),
        (jnp.bfloat16, 4, 1, 256, 4, 16, 9, 2),
        (jnp.bfloat16, 6, 1, 256, 4, 16, 9, 1),
        (jnp.bfloat16, 3, 1, 64, 2, 16, 9, 1),  # heads in pieces of two and of one
        (jnp.float8_e4m3fn, 4, 2, 64, 4, 16, 14, 1),
        (jnp.float8_e4m3fn, 6, 1, 128, 3, 24, 9, 2),
        (jnp.float8_e4m3fn, 16, 1, 64, 9, 16, 9, 1),  # several query tiles
        (jnp.float8_e4m3fn, 6, 1, 256, 6, 16, 9, 1),  # the last of them with fewer tokens
        (jnp.float8_e4m3fn, 6, 1, 256, 6, 16, 9, 2),  # query tiles that are not full, to be merged
        (jnp.float8_e4m3fn, 2, 1, 256, 2, 544, 1, 7),
        (jnp.float32, 4, 2, 64, 3, 16, 9, 1),
        (jnp.float32, 2, 1, 128, 9, 24, 4, 2),  # several query tiles
        (jnp.float32, 4, 2, 256, 1, 64, 2, 3),
        (jnp.bfloat16, 16, 2, 512, 4, 16, 5, 1),
        (jnp.bfloat16, 4, 1, 512, 3, 24, 5, 2),
        (jnp.bfloat16, 16, 1, 512, 12, 64, 1, 1),  # several query tiles
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    dtype, heads, kv_heads, dim, width, page_size, table_width, splits
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    stages = 1 if dim == 256 and dtype == jnp.bfloat16 else 2
    run = interpreted(tiling_of(dtype, splits, stages), detect_races=True)
    shape = AttentionShape(heads, kv_heads, dim)
    case = kernel_case(shape, dtype, width, page_size, table_width)
    check(run, *case)
    assert not get_races().races_found
    if dim != WIDE:
        check(run, *case, gate_of(np.random.default_rng(1), case[0]))
        assert not get_races().races_found


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "width", "page_size", "table_width", "splits"),
    [
        (jnp.bfloat16, 16, 2, 64, 4, 16, 14, 1),  # then two splits
        (jnp.bfloat16, 2, 1, 128, 1, 64, 4, 8),  # then the sinks are in a second part of eight
        (jnp.float8_e4m3fn, 6, 1, 128, 3, 24, 9, 2),
        (jnp.float32, 4, 2, 64, 3, 16, 9, 3),
    ],
)
def test_the_kernel_adds_sinks(dtype, heads, kv_heads, dim, width, page_size, table_width, splits):
    """Small ones, and one so large that it takes nearly all weight."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    run = interpreted(tiling_of(dtype, splits), detect_races=True)
    case = kernel_case(AttentionShape(heads, kv_heads, dim), dtype, width, page_size, table_width)
    sinks = normal(np.random.default_rng(2), heads)
    sinks[0] = 30.0
    check(run, *case, sinks=jnp.asarray(sinks))
    check(run, *case, gate_of(np.random.default_rng(1), case[0]), sinks=jnp.asarray(sinks))
    assert not get_races().races_found


SCALES = [(0.3, 2.5), (1.7, 300.0)]  # 448 * 300 is no float16
FP8 = jnp.float8_e4m3fn


def scaled_case(*args, values, seed=0):
    """A case whose values reach `values`, for the scales of keys and of values."""
    queries, kv, tables, rows = kernel_case(*args, seed=seed)
    wide = kv.astype(jnp.float32)
    largest = jnp.nanmax(jnp.abs(wide[1, 1]))
    return queries, wide.at[1, 1].multiply(values / largest).astype(kv.dtype), tables, rows


@pytest.mark.mosaic
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width", "page_size", "table_width", "splits"),
    [(4, 2, 64, 4, 16, 14, 1), (6, 1, 128, 3, 24, 9, 2), (6, 1, 256, 6, 16, 9, 1)],
)
def test_the_kernel_multiplies_by_the_scales_of_keys_and_values(
    heads, kv_heads, dim, width, page_size, table_width, splits, scales
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    run, shape = interpreted(tiling_of(FP8, splits), detect_races=True), (heads, kv_heads, dim)
    case = scaled_case(AttentionShape(*shape), FP8, width, page_size, table_width, values=3.0)
    scales = jnp.asarray(scales, jnp.float32)
    check(run, *case, scales=scales)
    check(run, *case, gate_of(np.random.default_rng(1), case[0]), scales)
    assert not get_races().races_found


@pytest.mark.mosaic
@pytest.mark.parametrize("splits", [1, 2])
def test_scaled_values_beyond_float16_are_no_infinity(splits):
    queries, kv, tables, rows = kernel_case(AttentionShape(2, 1, 64), FP8, 2, 16, 9)
    kv = jnp.where(jnp.isnan(kv), kv, jnp.asarray(320, FP8))
    scales = jnp.asarray([0.5, 300.0], jnp.float32)
    out = interpreted(tiling_of(FP8, splits))(queries, kv, 1, tables, rows, None, scales)
    np.testing.assert_allclose(np.asarray(out, np.float32)[REAL[0]], 96000, rtol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("model", "table_width"), [("qwen3-8b", 40), ("qwen3.5-27b", 15)])
def test_on_a_gpu_scaled_pools_are_read_by_the_kernel(model, table_width, scales):
    dispatch._chosen.pop("paged_attention", None)
    # A function of its own, so that it is traced again.
    run = jax.jit(functools.partial(paged_attention), static_argnums=2)
    case = scaled_case(ATTENTION[model], FP8, 4, 16, table_width, values=3.0)
    scales = jnp.asarray(scales, jnp.float32)
    check(run, *case, scales=scales)
    check(run, *case, gate_of(np.random.default_rng(1), case[0]), scales)
    assert dispatch.implementations()["paged_attention"] == ("kernel",)


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        *((dtype, 64) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32)),
        (jnp.bfloat16, WIDE),
    ],
)
@pytest.mark.parametrize("num_computed", GARBAGE)
def test_a_live_row_out_of_range_harms_no_other(dtype, dim, num_computed):
    """It stands where no table reaches, with more tokens than there are."""
    queries, kv, tables, rows = kernel_case(AttentionShape(2, 1, dim), dtype, 2, 16, 4)
    run = interpreted(tiling_of(dtype, splits=2))
    expected = run(queries, kv, 1, tables, rows)
    wild = dataclasses.replace(
        rows,
        num_computed=rows.num_computed.at[7].set(num_computed),
        query_len=rows.query_len.at[7].set(2**31 - 1),
    )
    out = run(queries, kv, 1, tables, wild)
    np.testing.assert_array_equal(out[:7].astype(jnp.float32), expected[:7].astype(jnp.float32))


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (AttentionShape(2, 1, 64), jnp.bfloat16),
        (AttentionShape(2, 1, 64), jnp.float32),
        (AttentionShape(4, 1, WIDE), jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("first_failed", [1, 3])
def test_a_draft_that_is_nan_changes_no_token_before_it(shape, dtype, first_failed):
    case = kernel_case(shape, dtype, 4, 16, 9)
    check_failed_drafts(interpreted(tiling_of(dtype, splits=2)), case, first_failed)


@pytest.mark.parametrize("first_failed", [1, 3])
def test_the_reference_keeps_a_draft_that_is_nan_from_the_tokens_before_it(first_failed):
    case = kernel_case(AttentionShape(2, 1, 64), jnp.float32, 4, 16, 9)
    check_failed_drafts(reference, case, first_failed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_on_a_gpu_a_draft_that_is_nan_changes_no_token_before_it(dtype):
    run = jax.jit(paged_attention, static_argnums=2)
    for first_failed in (1, 3):
        check_failed_drafts(run, kernel_case(ATTENTION["qwen3-8b"], dtype, 4, 16, 40), first_failed)


@pytest.mark.mosaic
def test_a_query_beyond_float16_is_no_infinity_over_8_bits():
    """Where the key is 0 it would make a NaN."""
    shape, dtype = AttentionShape(2, 1, 64), jnp.float8_e4m3fn
    queries, kv, tables, rows = kernel_case(shape, dtype, 1, 16, 4)
    queries = queries.at[..., 0].set(1e6)
    kv = kv.at[:, 0, ..., 0].multiply(jnp.zeros((), kv.dtype))  # NaN stays
    check(interpreted(tiling_of(dtype, splits=1)), queries, kv, tables, rows)


@pytest.mark.mosaic
@pytest.mark.parametrize(("more_columns", "splits"), [(4, 1), (4, 2), (5, 2)])
def test_gates_of_any_projection_are_taken(more_columns, splits):
    """XLA gates where the columns are no whole heads or, after splits, no whole fours."""
    case = kernel_case(AttentionShape(2, 1, 64), jnp.bfloat16, 2, 16, 9)
    gate = gate_of(np.random.default_rng(0), case[0])
    gate = OutputGate(jnp.pad(gate.projected, ((0, 0), (0, more_columns))))
    check(interpreted(tiling_of(jnp.bfloat16, splits)), *case, gate)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "dtype", "page_size", "table_width", "width"),
    [
        ("qwen3-8b", jnp.bfloat16, 16, 40, 4),
        ("qwen3.5-9b", jnp.bfloat16, 16, 40, 4),
        ("qwen3.5-27b", jnp.bfloat16, 544, 3, 3),
        ("qwen3.5-35b-a3b", jnp.bfloat16, 64, 9, 1),
        ("nemotron-3-nano", jnp.bfloat16, 64, 9, 9),
        ("llama-3.2-1b", jnp.bfloat16, 16, 40, 9),
        ("qwen3-8b", jnp.float8_e4m3fn, 16, 40, 4),
        ("qwen3.5-9b", jnp.float8_e4m3fn, 16, 40, 4),
        ("qwen3.5-27b", jnp.float8_e4m3fn, 544, 3, 9),
        ("nemotron-3-nano", jnp.float8_e4m3fn, 64, 9, 9),
        ("llama-3.2-1b", jnp.float8_e4m3fn, 24, 40, 1),
        ("qwen3-8b", jnp.float32, 16, 40, 4),
        ("qwen3.5-9b", jnp.float32, 544, 3, 9),
        ("llama-3.2-1b", jnp.float32, 64, 9, 1),
        # A row as short as these is one block's, which gates and puts out itself.
        ("qwen3.5-9b", jnp.bfloat16, 16, 15, 4),
        ("qwen3.5-27b", jnp.bfloat16, 16, 15, 9),
        ("llama-3.2-1b", jnp.bfloat16, 16, 15, 4),
        ("llama-3.2-1b", jnp.float32, 16, 15, 4),
        ("qwen3.5-27b", jnp.float8_e4m3fn, 16, 15, 9),
        ("qwen3-8b", jnp.float8_e4m3fn, 16, 15, 4),
        ("gemma-4-e2b", jnp.bfloat16, 16, 40, 4),
        ("gemma-4-e4b", jnp.bfloat16, 64, 9, 1),
        ("gemma-4-31b", jnp.bfloat16, 544, 3, 9),
    ],
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(
    model, dtype, page_size, table_width, width
):
    dispatch._chosen.pop("paged_attention", None)
    run = jax.jit(paged_attention, static_argnums=2)
    case = kernel_case(SHAPES[model], dtype, width, page_size, table_width, seed=width)
    check(run, *case)
    check(run, *case, gate_of(np.random.default_rng(1), case[0]))
    assert dispatch.implementations()["paged_attention"] == ("kernel",)
