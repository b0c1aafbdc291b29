"""The kernel of window_prefill equals its reference: in Mosaic's interpreter, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, normal, prompt_chunks

from benchmarks.measure.shapes import AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention import prefill_kernel
from jaxspec.pallas.attention.ring_tables import kept_length, ring_length
from jaxspec.pallas.attention.window import window_prefill, window_prefill_reference

BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
LAYERS, NUM_SLOTS, WIDTH = 2, 6, 4
# Padding by slot, by length, and by slots that do not exist; the other chunks are REAL.
SLOTS = np.array([3, 0, 4, 10**6, 1, -1, 5, 2], np.int32)
REAL, EMPTY = (0, 4, 6, 7), 2
SCALES = jnp.asarray([0.3, 2.5], jnp.float32)
GPT_OSS, GEMMA, E2B = (AttentionShape(*x) for x in ((64, 8, 64), (16, 8, 256), (8, 1, 256)))

reference = jax.jit(window_prefill_reference, static_argnums=4, static_argnames="window")


def case_of(shape, dtype, window, lengths, computed, seed=0):
    """Queries, keys, values, rings and chunks; NaN is in what no token wrote, and in padding.

    `lengths` and `computed` are those of the chunks in REAL. The others but EMPTY have 7 tokens
    each, and the last 5 tokens belong to none.
    """
    rng, ring = np.random.default_rng(seed), ring_length(window, WIDTH)
    count, before = np.full(len(SLOTS), 7), rng.choice(GARBAGE, len(SLOTS))
    count[EMPTY] = 0
    count[list(REAL)], before[list(REAL)] = lengths, computed
    start = np.concatenate([[0], np.cumsum(count)])
    heads = shape.kv_heads, shape.head_dim
    pool = np.full((LAYERS, NUM_SLOTS, ring, 2, *heads), np.nan, np.float32)
    queries = np.full((start[-1] + 5, shape.heads, shape.head_dim), np.nan, np.float32)
    new = np.full((2, len(queries), *heads), np.nan, np.float32)
    for seq in REAL:
        there = np.arange(max(0, before[seq] - kept_length(window)), before[seq])
        pool[1, SLOTS[seq], there % ring] = normal(rng, len(there), 2, *heads)
        chunk = slice(start[seq], start[seq + 1])
        queries[chunk] = normal(rng, count[seq], *queries.shape[1:])
        new[:, chunk] = normal(rng, 2, count[seq], *heads)
    chunks = prompt_chunks(SLOTS, before, start)
    return *(jnp.asarray(x, BF16) for x in (queries, *new)), jnp.asarray(pool, dtype), 1, chunks


def check(run, case, **options):
    """`run` equals the reference and writes the same rings; its output is 0 in padding."""
    scales, chunks = options.get("scales"), case[-1]
    expected, wanted = reference(*case, **options)
    out, pool = (np.asarray(x, np.float32) for x in run(*case, **options))
    expected, start = np.asarray(expected, np.float32), np.asarray(chunks.query_start)
    padding = np.ones(len(out), bool)
    # Weights are rounded to 16 bits before they meet the values.
    tolerance = 4 * float(jnp.finfo(BF16).eps) * (1 if scales is None else float(scales[1]))
    for seq in REAL:
        chunk = slice(start[seq], start[seq + 1])
        padding[chunk] = False
        np.testing.assert_allclose(out[chunk], expected[chunk], atol=tolerance, rtol=0)
    assert not np.any(out[padding])
    np.testing.assert_array_equal(pool, np.asarray(wanted, np.float32))


@pytest.fixture
def interpreted(monkeypatch):
    """The op as its kernel in Mosaic's interpreter, with the race detector."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=True)
    kernel = functools.partial(
        prefill_kernel.prefill_attention_kernel, block_kv=64, interpret=interpret
    )
    monkeypatch.setattr(prefill_kernel, "prefill_attention_kernel", kernel)
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def run(*case, **options):
        found = window_prefill(*case, **options)
        assert not get_races().races_found
        return found

    return run


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "window", "lengths", "computed"),
    [
        (BF16, 8, 2, 64, 17, [33, 1, 70, 3], [0, 130, 70, 9]),
        (BF16, 4, 2, 64, 40, [70, 9, 0, 41], [200, 39, 50, 0]),
        (BF16, 3, 1, 64, 130, [67, 1, 30, 0], [301, 64, 65, 0]),  # cut by tokens, not heads
        (BF16, 2, 1, 64, 1, [33, 1, 2, 3], [0, 130, 70, 9]),
        (BF16, 4, 1, 256, 33, [30, 1, 5, 0], [40, 0, 32, 9]),
        (FP8, 4, 2, 64, 40, [70, 9, 0, 41], [200, 39, 50, 0]),
        (FP8, 2, 1, 256, 33, [30, 1, 5, 0], [40, 0, 32, 9]),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    interpreted, dtype, heads, kv_heads, dim, window, lengths, computed
):
    case = case_of(AttentionShape(heads, kv_heads, dim), dtype, window, lengths, computed)
    check(interpreted, case, window=window)


@pytest.mark.mosaic
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_the_kernel_has_sinks_and_scales(interpreted, dtype):
    """Small sinks, and one so large that it takes nearly all weight."""
    sinks = normal(np.random.default_rng(2), 8)
    sinks[-1] = 30.0
    case = case_of(AttentionShape(8, 1, 64), dtype, 17, [33, 1, 9, 3], [0, 130, 70, 9])
    scales = SCALES if dtype == FP8 else None
    check(interpreted, case, window=17, sinks=jnp.asarray(sinks), scales=scales)


@pytest.mark.mosaic
@pytest.mark.parametrize("computed", [2**31 - 1, -(2**31)])
def test_live_chunks_out_of_range_harm_no_other(interpreted, computed):
    """The first has no such positions, the last ends where no tokens are."""
    case = case_of(AttentionShape(2, 1, 64), BF16, 17, [33, 1, 9, 3], [0, 130, 70, 9])
    *operands, chunks = case
    wild = dataclasses.replace(
        chunks,
        num_computed=chunks.num_computed.at[0].set(computed),
        query_start=chunks.query_start.at[-1].set(2**31 - 1),
    )
    expected, out = (interpreted(*operands, each, window=17)[0] for each in (chunks, wild))
    others = slice(int(chunks.query_start[1]), int(chunks.query_start[-2]))
    np.testing.assert_array_equal(*(x[others].astype(jnp.float32) for x in (out, expected)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize(("shape", "window"), [(GPT_OSS, 128), (GEMMA, 1024), (E2B, 512)])
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, window, dtype):
    dispatch._chosen.pop("window_prefill", None)
    anew = functools.partial(window_prefill)  # another function, so that it is traced again
    run = jax.jit(anew, static_argnums=4, static_argnames="window")
    lengths, computed = [301, 1, window + 67, 129], [0, 5 * window + 3, window - 5, 2 * window]
    options = {"window": window}
    if shape is GPT_OSS:
        options["sinks"] = jnp.asarray(normal(np.random.default_rng(2), shape.heads))
    if dtype == FP8:
        options["scales"] = SCALES
    check(run, case_of(shape, dtype, window, lengths, computed), **options)
    assert dispatch.implementations()["window_prefill"] == ("kernel",)
