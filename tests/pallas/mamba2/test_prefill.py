"""mamba2_prefill, chunked, against the token-by-token reference, and that against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2 import SMALL, oracle
from mamba2 import operands as tokens_of
from regions import decode_region, prefill_region

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.prefill import mamba2_prefill, mamba2_prefill_reference
from jaxspec.pallas.mamba2.prefill_kernel import _schedule, mamba2_prefill_kernel
from jaxspec.pallas.mamba2.prefill_tiles import Sizes, Tile
from jaxspec.pallas.mamba2.step import mamba2_step
from jaxspec.pallas.mamba2.tokens import Mamba2Tokens
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, sequences

LAYERS, SLOTS, CANDIDATES = 2, 6, 3
POOL = (LAYERS, SLOTS, CANDIDATES, SMALL.heads, SMALL.head_dim, SMALL.state_dim)
TOKENS = 200

chunked = jax.jit(mamba2_prefill, static_argnums=2)
sequential = jax.jit(mamba2_prefill_reference, static_argnums=2)

LENGTHS = [
    [200, 0, 0, 0, 0],
    [64, 64, 1, 63, 8],
    [65, 0, 127, 3, 5],
    [1, 2, 3, 4, 5],
    [0, 0, 0, 0, 0],
]


def draw_tokens(rng, *batch, shape=SMALL):
    """Tokens as a layer makes them, in NumPy arrays that a test may change."""
    return Mamba2Tokens(*tokens_of(rng, *batch, shape=shape))


def at(tokens, where):
    """The tokens at these indices; A and D have one value a head."""
    return Mamba2Tokens(*(y if y.ndim == 1 else y[where] for y in tokens))


def spoil(tokens, where):
    """Make them NaN."""
    for y in tokens:
        if y.ndim > 1:
            y[where] = np.nan


@pytest.mark.parametrize("step_size", [0.02, 1.0, 60.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_both_forms_equal_the_recurrence(lengths, step_size):
    rng = np.random.default_rng(0)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = draw_tokens(rng, TOKENS)
    tokens.dt[:] *= step_size
    tokens.x[:] /= max(1.0, step_size)
    start = np.concatenate([[0], np.cumsum(lengths)])
    spoil(tokens, slice(start[-1], None))  # padding
    slots, offset, computed = [1, 5, 2, 4, 3], [0, 2, 1, 0, 2], [0, 9, 0, 4, 1]
    expected, pool = np.zeros(tokens.x.shape), states.astype(np.float64)
    for seq, slot in enumerate(slots):
        own = slice(start[seq], start[seq + 1])
        initial = states[1, slot, offset[seq]] if computed[seq] else np.zeros(POOL[3:])
        if lengths[seq]:
            expected[own], after = oracle(initial, *at(tokens, own))
            pool[1, slot, 0] = after[-1]
    chunks = prefill_region(slots, start, num_computed=computed, state_offset=offset)
    for form in (sequential, chunked):
        out, after = form(tokens, jnp.asarray(states), 1, chunks)
        np.testing.assert_allclose(out, expected, atol=2e-5)
        np.testing.assert_allclose(after, pool, atol=2e-5)


def test_a_prefill_is_as_many_steps():
    rng = np.random.default_rng(3)
    lengths, width = [9, 4, 7], 9
    pool = (LAYERS, SLOTS, width, *POOL[3:])
    states = jnp.asarray(rng.normal(size=pool), jnp.float32)
    rectangle = draw_tokens(rng, len(lengths), width)
    slots, offset = [2, 5, 1], [0, 3, 8]
    rows = decode_region(slots, lengths, state_offset=offset)
    want, by_steps = mamba2_step(rectangle, states, 1, rows)
    flat = Mamba2Tokens(
        *(
            y if y.ndim == 1 else np.concatenate([y[row, :n] for row, n in enumerate(lengths)])
            for y in rectangle
        )
    )
    start = np.cumsum([0, *lengths])
    chunks = prefill_region(slots, start, num_computed=1, state_offset=offset)
    out, after = chunked(flat, states, 1, chunks)
    for row, count in enumerate(lengths):
        own, slot = out[start[row] : start[row + 1]], slots[row]
        np.testing.assert_allclose(own, want[row, :count], atol=1e-5)
        np.testing.assert_allclose(after[1, slot, 0], by_steps[1, slot, count - 1], atol=1e-5)


@pytest.mark.parametrize("form", [sequential, chunked])
def test_padding_is_inert(form):
    rng = np.random.default_rng(1)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = jax.tree.map(lambda y: jnp.full_like(y, jnp.nan), draw_tokens(rng, TOKENS))
    slots, start, garbage = [0, -2, 3, 10**6], [0, 70, 80, 80, 90], [10**6, -5, 2**31 - 1, -(2**31)]
    chunks = prefill_region(slots, start, num_computed=garbage, state_offset=garbage)
    out, after = form(tokens, jnp.asarray(states), 1, chunks)
    np.testing.assert_array_equal(after, states)
    np.testing.assert_array_equal(out, np.zeros(out.shape))


@pytest.mark.parametrize("form", [sequential, chunked])
def test_tokens_may_come_in_the_dtype_of_the_model(form):
    tokens, chunks = (
        draw_tokens(np.random.default_rng(2), TOKENS),
        prefill_region([2, 3], [0, 70, 90]),
    )
    tokens = in_dtype(tokens, jnp.bfloat16)
    narrow = form(tokens, jnp.zeros(POOL), 1, chunks)
    wide = form(in_dtype(tokens, jnp.float32), jnp.zeros(POOL), 1, chunks)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def in_dtype(tokens, dtype):
    """Tokens whose `x`, `B` and `C` have this dtype."""
    x, b, c = (jnp.asarray(y, dtype) for y in (tokens.x, tokens.b, tokens.c))
    return tokens._replace(x=x, b=b, c=c)


@pytest.mark.parametrize("form", [sequential, chunked])
def test_states_may_have_more_rows_a_head_than_x(form):
    """As for heads of 80 in pools for 128: the rest is zeros, and stays so."""
    rng = np.random.default_rng(7)
    narrow = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    wide = jnp.pad(narrow, [(0, 0)] * 4 + [(0, 3), (0, 0)])
    tokens, chunks = draw_tokens(rng, TOKENS), prefill_region([2, 3], [0, 70, 90], num_computed=1)
    want, expected = form(tokens, narrow, 1, chunks)
    out, after = form(tokens, wide, 1, chunks)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(after[..., : SMALL.head_dim, :], expected, atol=1e-5)
    assert not np.any(after[..., SMALL.head_dim :, :])


# The kernel. Sequences, from token 3 on: a chunk and a bit that begins its prompt, less than a
# chunk, none, one whose inputs are all NaN, padding by slot, three chunks, padding by a slot that
# is not there.
LENGTH = [70, 5, 0, 20, 9, 130, 7]
START = 3 + np.concatenate([[0], np.cumsum(LENGTH)])
SEQUENCES = prefill_region(
    slots=[3, 2, 1, 5, 0, 4, 10**6],
    query_start=START,
    num_computed=[0, 9, 3, 5, 10**6, 64, -1],
    state_offset=[10**6, 1, 0, 0, -5, -(2**31), 7],
)
REAL, POISONED = (0, 1, 5), 3


def kernel_case(shape, dtype, states_dtype, seed=0):
    """Tokens and pool; padding tokens are NaN, and two decays leave nothing of the state."""
    rng = np.random.default_rng(seed)
    tokens = draw_tokens(rng, -(-(START[-1] + 11) // 8) * 8, shape=shape)
    tokens.dt[:] *= 0.3
    for strong in (START[0] + 40, START[5] + 80):
        tokens.x[strong], tokens.dt[strong] = 0.0, 1e5
    padding = np.ones(len(tokens.x), bool)
    for seq in REAL:
        padding[START[seq] : START[seq + 1]] = False
    spoil(tokens, padding)
    pool = (LAYERS, 6, CANDIDATES, shape.heads, shape.head_dim, shape.state_dim)
    states = jnp.asarray(rng.normal(size=pool), states_dtype)
    return in_dtype(tokens, dtype), states


def error(ours, exact):
    ours, exact = (np.asarray(y, np.float64) for y in (ours, exact))
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


def check(tokens, states, run):
    """`run` is the reference: in outputs, in states written, and in all it must not write."""
    expected, expected_pool = sequential(tokens, states, 1, SEQUENCES)
    out, after = (np.asarray(y, np.float32) for y in run(tokens, states, 1, SEQUENCES))
    bound = 1e-2 if tokens.x.dtype == jnp.bfloat16 else 1.5e-3
    rounding = 0.0 if states.dtype == jnp.float32 else float(jnp.finfo(states.dtype).eps)
    untouched, padding = np.ones(states.shape[:3], bool), np.ones(len(out), bool)
    for seq in (*REAL, POISONED):
        own, slot = slice(START[seq], START[seq + 1]), int(SEQUENCES.slots[seq])
        untouched[1, slot, 0], padding[own] = False, False
        if seq == POISONED:
            assert np.isnan(out[own]).all() and np.isnan(after[1, slot, 0]).all()
            continue
        assert error(out[own], expected[own]) < bound
        assert error(after[1, slot, 0], expected_pool[1, slot, 0]) < bound / 2 + rounding
    np.testing.assert_array_equal(after[untouched], np.asarray(states, np.float32)[untouched])
    assert not np.any(out[padding])


@pytest.mark.parametrize(
    ("dtype", "states_dtype", "shape", "tile"),
    [
        (jnp.bfloat16, jnp.float32, Mamba2Shape(2, 1, 64, 128), None),  # no prompt is cut
        (jnp.bfloat16, jnp.bfloat16, Mamba2Shape(2, 2, 128, 64), 64),
        (jnp.float16, jnp.float16, Mamba2Shape(4, 2, 64, 64), 128),
    ],
)
def test_the_kernels_equal_their_reference_without_races(
    interpreter, dtype, states_dtype, shape, tile
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(tokens, states, layer, chunks):
        operands = tokens, states, jnp.int32(layer), chunks
        return mamba2_prefill_kernel(*operands, tile=tile, interpret=interpreter)

    check(*kernel_case(shape, dtype, states_dtype), run)
    assert not get_races().races_found


@pytest.mark.mosaic
def test_tiles_hold_every_token_once_and_begin_where_copies_may():
    rng, tokens = np.random.default_rng(4), 1000
    schedule = jax.jit(_schedule, static_argnums=0)
    for tile in (64, 192, 1024):
        sizes = Sizes(1, 9, 2, 1, 64, 64, groups=1, tokens=tokens, tile=tile, dtype=jnp.bfloat16)
        for _ in range(10):
            edges = np.sort(rng.integers(0, tokens + 1, size=9))
            slots, computed = rng.integers(-1, 11, size=8), rng.integers(0, 2, size=8)
            chunks = prefill_region(slots, edges, num_computed=computed, state_offset=computed)
            seqs = sequences(chunks, tokens, sizes.num_slots)
            held, before = np.zeros(tokens, int), None
            for row in map(Tile._make, np.asarray(schedule(sizes, seqs))):
                if row.begin >= row.end:
                    continue
                held[row.begin : row.end] += 1
                owner = np.searchsorted(edges, row.begin, side="right") - 1
                real = 0 <= owner < 8 and 0 < slots[owner] < 9
                assert row.slot == (slots[owner] if real else 0)
                assert not real or row.source == (1 if computed[owner] else -1)
                assert row.end - row.begin // ALIGN * ALIGN <= tile
                assert 0 <= row.position < row.tiles
                assert row.position == 0 or row.begin % ALIGN == 0
                assert row.position == 0 or before == row.position - 1
                before = row.position
            assert (held == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("states_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*MAMBA2.values(), Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernels_and_equals_its_reference(shape, dtype, states_dtype):
    def cut(tokens, states, layer, chunks):
        return mamba2_prefill_kernel(tokens, states, jnp.int32(layer), chunks, tile=64)

    dispatch._chosen.pop("mamba2_prefill", None)
    for run in (chunked, cut):
        check(*kernel_case(shape, dtype, states_dtype), run)
    assert dispatch.implementations()["mamba2_prefill"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths", [[2048], [1, 2047], [512] * 4, [1000, 1, 7, 8, 1032], [5, 3]], ids=str
)
def test_on_a_gpu_sequences_of_any_length_stay_exact(lengths):
    rng, shape = np.random.default_rng(7), MAMBA2["nemotron-3-nano"]
    tokens = in_dtype(draw_tokens(rng, sum(lengths), shape=shape), jnp.bfloat16)
    tokens.dt[:] *= 0.02  # the steps of a head that forgets slowly
    seqs = len(lengths)
    pool = (1, seqs + 1, 2, shape.heads, shape.head_dim, shape.state_dim)
    states = jnp.asarray(rng.normal(size=pool), jnp.float32)
    start, computed = [0, *np.cumsum(lengths)], range(seqs)
    slots = range(1, seqs + 1)
    chunks = prefill_region(slots, start, num_computed=computed, state_offset=1)
    expected, expected_pool = sequential(tokens, states, 0, chunks)
    for _ in range(3):  # a race shows now and then
        out, after = chunked(tokens, states, 0, chunks)
        assert error(out, expected) < 1e-2
        assert error(after[0, 1:, 0], expected_pool[0, 1:, 0]) < 5e-3
        np.testing.assert_array_equal(after[0, :, 1], states[0, :, 1])
