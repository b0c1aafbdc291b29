"""The kernel of window_attention equals its reference: in Mosaic's interpreter, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, decode_rows, normal

from benchmarks.measure.shapes import AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.paged_tiling import Tiling
from jaxspec.pallas.attention.ring_tables import PAGE, in_pages, kept_length, ring_length
from jaxspec.pallas.attention.window import window_attention, window_read, window_read_reference

LAYERS, NUM_SLOTS = 2, 6
# Padding by slot, by length, and by slots that do not exist; the other rows are REAL.
SLOTS = np.array([3, 0, 4, 10**6, -1, 1, 5, 2], np.int32)
REAL = (0, 5, 6, 7)
GPT_OSS, GEMMA = AttentionShape(64, 8, 64), AttentionShape(32, 16, 256)

reference = jax.jit(window_read_reference, static_argnums=2, static_argnames="window")


def case_of(shape, dtype, window, width, seed=0):
    """Queries, rings and rows; NaN is in all that no row wrote, and in padding.

    Row 0 is at its first token. The others are about a window behind it, far behind, and where the
    ring begins anew. A row has written its tokens, and before them what a prompt leaves.
    """
    rng, ring = np.random.default_rng(seed), ring_length(window, width)
    query_len = np.array([width, width, 0, width, width, 1, max(1, width - 1), width], np.int32)
    num_computed = np.array([0, 5, 5, 5, 5, window - 1, 40 * ring + 3, 3 * ring - 1], np.int32)
    heads = shape.kv_heads, shape.head_dim
    pool = np.full((LAYERS, NUM_SLOTS, ring, 2, *heads), np.nan, np.float32)
    for row in REAL:
        first = max(0, num_computed[row] - kept_length(window))
        there = np.arange(first, num_computed[row] + query_len[row])
        pool[1, SLOTS[row], there % ring] = normal(rng, len(there), 2, *heads)
    queries = normal(rng, len(SLOTS), width, shape.heads, shape.head_dim)
    for row in range(len(SLOTS)):
        queries[row, query_len[row] if row in REAL else 0 :] = np.nan
    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    rows = decode_rows(SLOTS, num_computed, query_len)
    return jnp.asarray(queries, wide), jnp.asarray(pool, dtype), rows


def check(run, queries, pool, rows, window, sinks=None):
    """`run` equals the reference, and is 0 in padding rows and tokens."""
    options = {"window": window, "sinks": sinks}
    expected = np.asarray(reference(queries, pool, 1, rows, **options), np.float32)
    out = np.asarray(run(queries, pool, 1, rows, **options), np.float32)
    tolerance = 4e-6 if pool.dtype == jnp.float32 else 4 * float(jnp.finfo(jnp.bfloat16).eps)
    for row, count in enumerate(np.asarray(rows.query_len)):
        real = count if row in REAL else 0
        assert not np.any(out[row, real:])
        np.testing.assert_allclose(out[row, :real], expected[row, :real], atol=tolerance, rtol=0)


def interpreted(splits, **params):
    """The op as its kernel in Mosaic's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.attention.paged_kernel import paged_attention_kernel

    interpret = plgpu.InterpretGPUParams(**params)

    def run(queries, pool, layer, rows, *, window, sinks=None):
        num_slots, ring = pool.shape[1:3]
        tables, region = in_pages(rows, num_slots, ring, window, queries.shape[1])
        tiling = Tiling(32 if pool.dtype == jnp.float32 else 64, stages=2, splits=splits)
        return paged_attention_kernel(
            *(queries, pool, jnp.int32(layer), tables, region, None, None, sinks),
            window=window,
            tiling=tiling,
            interpret=interpret,
        )

    return run


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "window", "width", "splits"),
    [
        (jnp.bfloat16, 4, 2, 64, 128, 4, 1),
        (jnp.bfloat16, 4, 2, 64, 128, 1, 2),
        (jnp.bfloat16, 4, 2, 128, 5, 4, 1),
        (jnp.bfloat16, 2, 1, 64, 90, 3, 2),
        (jnp.bfloat16, 16, 1, 64, 40, 9, 1),  # several query tiles
        (jnp.float8_e4m3fn, 4, 2, 64, 90, 4, 1),
        (jnp.float8_e4m3fn, 6, 1, 256, 33, 6, 2),
        (jnp.float32, 4, 2, 64, 90, 4, 1),
        (jnp.float32, 4, 2, 64, 2, 1, 2),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    dtype, heads, kv_heads, dim, window, width, splits
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    case = case_of(AttentionShape(heads, kv_heads, dim), dtype, window, width)
    run = interpreted(splits, detect_races=True)
    check(run, *case, window)
    assert not get_races().races_found
    sinks = jnp.asarray(normal(np.random.default_rng(2), heads))
    check(run, *case, window, sinks)


@pytest.mark.mosaic
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_draft_that_is_nan_changes_no_token_before_it(dtype):
    width, window = 4, 40
    queries, pool, rows = case_of(AttentionShape(2, 1, 64), dtype, window, width)
    run, failed = interpreted(splits=2), pool
    for row in REAL:
        for draft in range(2, int(rows.query_len[row])):
            place = (int(rows.num_computed[row]) + draft) % pool.shape[2]
            failed = failed.at[1, SLOTS[row], place].set(jnp.nan)
    sound, out = (
        np.asarray(run(queries, each, 1, rows, window=window), np.float32)
        for each in (pool, failed)
    )
    for row in REAL:
        np.testing.assert_array_equal(out[row, :2], sound[row, :2])
        assert np.isnan(out[row, 2 : int(rows.query_len[row])]).all()


@pytest.mark.mosaic
def test_a_smaller_window_of_a_ring_is_read():
    """As by an assistant, whose token takes one place of the window."""
    case = case_of(AttentionShape(2, 1, 64), jnp.bfloat16, 40, 1)
    check(interpreted(splits=1), *case, window=39)


@pytest.mark.parametrize("window", [2, 17, 128])
def test_pages_have_each_position_of_a_window_once(window):
    """Those that a row's tokens see are where the ring has them."""
    width, num_slots = 4, 3
    ring = ring_length(window, width)
    rows = decode_rows([1, 2, 1], [0, window + 5, 7 * ring - 2], [4, 1, 3])
    tables, region = in_pages(rows, num_slots, ring, window, width)
    assert ring % PAGE == 0 and tables.shape[1] * PAGE <= ring and not np.asarray(tables[0]).any()
    for row, (slot, computed) in enumerate([(1, 0), (2, window + 5), (1, 7 * ring - 2)]):
        shift = computed - int(region.num_computed[row])
        assert shift % PAGE == 0 and int(region.slots[row]) == row + 1
        for position in range(max(0, computed - window + 1), computed + width):
            page = int(tables[row + 1, (position - shift) // PAGE])
            assert page * PAGE + position % PAGE == slot * ring + position % ring


def test_rows_out_of_range_have_tables_in_range():
    ring = ring_length(8, 4)
    rows = decode_rows([1] * len(GARBAGE), GARBAGE, [4] * len(GARBAGE))
    tables, region = in_pages(rows, 3, ring, 8, 4)
    assert (np.asarray(tables) >= 0).all() and (np.asarray(tables) < 3 * ring // PAGE).all()
    assert (np.asarray(region.num_computed) < ring).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32])
@pytest.mark.parametrize(
    ("shape", "window"), [(GPT_OSS, 128), (GEMMA, 1024), (AttentionShape(8, 1, 256), 512)]
)
@pytest.mark.parametrize("width", [1, 4])
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, window, dtype, width):
    dispatch._chosen.pop("window_attention", None)
    anew = functools.partial(window_read)  # another function, so that it is traced again
    run = jax.jit(anew, static_argnums=2, static_argnames="window")
    case = case_of(shape, dtype, window, width)
    check(run, *case, window)
    if shape is GPT_OSS:
        check(run, *case, window, jnp.asarray(normal(np.random.default_rng(2), shape.heads)))
    assert dispatch.implementations()["window_attention"] == ("kernel",)
    keys, values = jnp.zeros((2, *case[0].shape[:2], shape.kv_heads, shape.head_dim), dtype)
    write = jax.jit(window_attention, static_argnums=4, static_argnames="window", donate_argnums=3)
    out, _ = write(case[0], keys, values, case[1], 1, case[2], window=window)
    assert out.shape == case[0].shape
