"""mamba2_prefill, chunked, against the token-by-token reference, and that against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2 import SMALL, int32, oracle
from mamba2 import operands as tokens_of

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.prefill import mamba2_prefill, mamba2_prefill_reference
from jaxspec.pallas.mamba2.step import mamba2_step

LAYERS, SLOTS, CANDIDATES = 2, 6, 3
POOL = (LAYERS, SLOTS, CANDIDATES, SMALL.heads, SMALL.head_dim, SMALL.state_dim)
TOKENS = 200

chunked = jax.jit(mamba2_prefill, static_argnums=7)
sequential = jax.jit(mamba2_prefill_reference, static_argnums=7)

LENGTHS = [
    [200, 0, 0, 0, 0],
    [64, 64, 1, 63, 8],
    [65, 0, 127, 3, 5],
    [1, 2, 3, 4, 5],
    [0, 0, 0, 0, 0],
]


def taken(operands, tokens):
    """Operands of some tokens; A and D have one a head."""
    return [y if y.ndim == 1 else y[tokens] for y in operands]


def spoil(operands, tokens):
    """NaN in them."""
    for y in operands:
        if y.ndim > 1:
            y[tokens] = np.nan


@pytest.mark.parametrize("step_size", [0.02, 1.0, 60.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_both_forms_equal_the_recurrence(lengths, step_size):
    rng = np.random.default_rng(0)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = tokens_of(rng, TOKENS)
    tokens[1] *= step_size
    tokens[0] /= max(1.0, step_size)
    start = np.concatenate([[0], np.cumsum(lengths)])
    spoil(tokens, slice(start[-1], None))  # padding
    slots, offset, computed = [1, 5, 2, 4, 3], [0, 2, 1, 0, 2], [0, 9, 0, 4, 1]
    expected, pool = np.zeros(tokens[0].shape), states.astype(np.float64)
    for seq, slot in enumerate(slots):
        mine = slice(start[seq], start[seq + 1])
        initial = states[1, slot, offset[seq]] if computed[seq] else np.zeros(POOL[3:])
        if lengths[seq]:
            expected[mine], after = oracle(initial, *taken(tokens, mine))
            pool[1, slot, 0] = after[-1]
    indices = (int32(*y) for y in (slots, offset, computed, start))
    arguments = (*tokens, jnp.asarray(states), 1, *indices)
    for form in (sequential, chunked):
        out, after = form(*arguments)
        np.testing.assert_allclose(out, expected, atol=2e-5)
        np.testing.assert_allclose(after, pool, atol=2e-5)


def test_a_prefill_is_as_many_steps():
    rng = np.random.default_rng(3)
    lengths, width = [9, 4, 7], 9
    pool = (LAYERS, SLOTS, width, *POOL[3:])
    states = jnp.asarray(rng.normal(size=pool), jnp.float32)
    rows = tokens_of(rng, len(lengths), width)
    index = int32(2, 5, 1), int32(0, 3, 8)
    want, by_steps = mamba2_step(*rows, states, 1, *index, int32(*lengths))
    flat = [
        y if y.ndim == 1 else np.concatenate([y[row, :n] for row, n in enumerate(lengths)])
        for y in rows
    ]
    start = np.cumsum([0, *lengths])
    out, after = chunked(*flat, states, 1, *index, int32(1, 1, 1), int32(*start))
    for row, count in enumerate(lengths):
        mine, slot = out[start[row] : start[row + 1]], index[0][row]
        np.testing.assert_allclose(mine, want[row, :count], atol=1e-5)
        np.testing.assert_allclose(after[1, slot, 0], by_steps[1, slot, count - 1], atol=1e-5)


@pytest.mark.parametrize("form", [sequential, chunked])
def test_padding_is_inert(form):
    rng = np.random.default_rng(1)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = [jnp.full_like(y, jnp.nan) for y in tokens_of(rng, TOKENS)]
    slots, start = int32(0, -2, 3, 10**6), int32(0, 70, 80, 80, 90)
    garbage = int32(10**6, -5, 2**31 - 1, -(2**31))
    out, after = form(*tokens, jnp.asarray(states), 1, slots, garbage, garbage, start)
    np.testing.assert_array_equal(after, states)
    np.testing.assert_array_equal(out, np.zeros(out.shape))


@pytest.mark.parametrize("form", [sequential, chunked])
def test_tokens_may_come_in_the_dtype_of_the_model(form):
    x, dt, a, b, c, d = tokens_of(np.random.default_rng(2), TOKENS)
    x, b, c = (jnp.asarray(y, jnp.bfloat16) for y in (x, b, c))
    rest = (jnp.zeros(POOL), 1, int32(2, 3), int32(0, 0), int32(0, 0), int32(0, 70, 90))
    wide = form(*(y.astype(jnp.float32) for y in (x, dt, a, b, c, d)), *rest)
    for ours, theirs in zip(form(x, dt, a, b, c, d, *rest), wide, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


# The kernel. Sequences, from token 3 on: a chunk and a bit that begins its prompt, less than a
# chunk, none, one whose inputs are all NaN, padding by slot, three chunks, padding by a slot that
# is not there.
SEQUENCES = {
    "slots": int32(3, 2, 1, 5, 0, 4, 10**6),
    "offset": int32(10**6, 1, 0, 0, -5, -(2**31), 7),
    "computed": int32(0, 9, 3, 5, 10**6, 64, -1),
}
LENGTH = [70, 5, 0, 20, 9, 130, 7]
REAL, POISONED = (0, 1, 5), 3


def kernel_case(shape, dtype, states_dtype, seed=0):
    """Operands with NaN in every token that is padding; two steps leave nothing of the state."""
    rng = np.random.default_rng(seed)
    start = 3 + np.concatenate([[0], np.cumsum(LENGTH)])
    tokens = tokens_of(rng, -(-(start[-1] + 11) // 8) * 8, shape=shape)
    tokens[1] *= 0.3
    for strong in (start[0] + 40, start[5] + 80):
        tokens[0][strong], tokens[1][strong] = 0.0, 1e5
    padding = np.ones(len(tokens[0]), bool)
    for seq in REAL:
        padding[start[seq] : start[seq + 1]] = False
    spoil(tokens, padding)
    x, dt, a, b, c, d = tokens
    x, b, c = (jnp.asarray(y, dtype) for y in (x, b, c))
    pool = (LAYERS, 6, CANDIDATES, shape.heads, shape.head_dim, shape.state_dim)
    states = jnp.asarray(rng.normal(size=pool), states_dtype)
    return (x, dt, a, b, c, d, states), int32(*start)


def error(ours, exact):
    ours, exact = (np.asarray(y, np.float64) for y in (ours, exact))
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


def check(operands, start, run):
    """`run` is the reference: in outputs, in states written, and in all it must not write."""
    states = operands[-1]
    indices = (*SEQUENCES.values(), start)
    expected, expected_pool = sequential(*operands, 1, *indices)
    out, after = (np.asarray(y, np.float32) for y in run(*operands, 1, *indices))
    bound = 1e-2 if operands[0].dtype == jnp.bfloat16 else 1.5e-3
    rounding = 0.0 if states.dtype == jnp.float32 else float(jnp.finfo(states.dtype).eps)
    untouched, padding = np.ones(states.shape[:3], bool), np.ones(len(out), bool)
    for seq in (*REAL, POISONED):
        mine, slot = slice(int(start[seq]), int(start[seq + 1])), int(SEQUENCES["slots"][seq])
        untouched[1, slot, 0], padding[mine] = False, False
        if seq == POISONED:
            assert np.isnan(out[mine]).all() and np.isnan(after[1, slot, 0]).all()
            continue
        assert error(out[mine], expected[mine]) < bound
        assert error(after[1, slot, 0], expected_pool[1, slot, 0]) < bound / 2 + rounding
    np.testing.assert_array_equal(after[untouched], np.asarray(states, np.float32)[untouched])
    assert not np.any(out[padding])


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize(
    ("dtype", "states_dtype", "shape", "tile"),
    [
        (jnp.bfloat16, jnp.float32, Mamba2Shape(2, 1, 64, 128), None),  # no prompt is cut
        (jnp.bfloat16, jnp.bfloat16, Mamba2Shape(2, 2, 128, 64), 64),
        (jnp.float16, jnp.float16, Mamba2Shape(4, 2, 64, 64), 128),
    ],
)
def test_the_kernels_equal_their_reference_without_races(dtype, states_dtype, shape, tile):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.mamba2.prefill_kernel import prefill

    interpret = plgpu.InterpretGPUParams(detect_races=True)

    def run(*args):
        layer = jnp.asarray(args[7], jnp.int32)
        return prefill(*args[:7], layer, *args[8:], tile=tile, interpret=interpret)

    check(*kernel_case(shape, dtype, states_dtype), run)
    assert not get_races().races_found


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need jax 0.11")
def test_tiles_hold_every_token_once_and_begin_where_copies_may():
    from jaxspec.pallas.mamba2.prefill_kernel import _schedule
    from jaxspec.pallas.mamba2.prefill_tiles import Sizes
    from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, sequences

    rng, tokens = np.random.default_rng(4), 1000
    schedule = jax.jit(_schedule, static_argnums=0)
    for tile in (64, 192, 1024):
        sizes = Sizes(1, 9, 2, 1, 64, 64, groups=1, tokens=tokens, tile=tile, dtype=jnp.bfloat16)
        for _ in range(10):
            edges = np.sort(rng.integers(0, tokens + 1, size=9))
            slots, computed = rng.integers(-1, 11, size=8), rng.integers(0, 2, size=8)
            seqs = sequences(tokens, *(int32(*y) for y in (edges, slots, computed, computed)))
            held, before = np.zeros(tokens, int), None
            for row in np.asarray(schedule(sizes, *seqs)):
                slot, source, begin, end, index, number = row
                if begin >= end:
                    continue
                held[begin:end] += 1
                owner = np.searchsorted(edges, begin, side="right") - 1
                real = 0 <= owner < 8 and 0 < slots[owner] < 9
                assert slot == (slots[owner] if real else 0)
                assert not real or source == (1 if computed[owner] else -1)
                assert end - begin // ALIGN * ALIGN <= tile and 0 <= index < number
                assert index == 0 or (begin % ALIGN == 0 and before == index - 1)
                before = index
            assert (held == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("states_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*MAMBA2.values(), Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernels_and_equals_its_reference(shape, dtype, states_dtype):
    from jaxspec.pallas.mamba2.prefill_kernel import prefill

    def cut(*args):
        return prefill(*args[:7], jnp.int32(args[7]), *args[8:], tile=64)

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
    x, dt, a, b, c, d = tokens_of(rng, sum(lengths), shape=shape)
    x, b, c = (jnp.asarray(y, jnp.bfloat16) for y in (x, b, c))
    dt *= 0.02  # what a slow head forgets
    seqs = len(lengths)
    pool = (1, seqs + 1, 2, shape.heads, shape.head_dim, shape.state_dim)
    states = jnp.asarray(rng.normal(size=pool), jnp.float32)
    start, every = int32(0, *np.cumsum(lengths)), jnp.arange(1, seqs + 1, dtype=jnp.int32)
    arguments = (x, dt, a, b, c, d, states, 0, every, every * 0 + 1, every - 1, start)
    expected, expected_pool = sequential(*arguments)
    for _ in range(3):  # a race shows now and then
        out, after = chunked(*arguments)
        assert error(out, expected) < 1e-2
        assert error(after[0, 1:, 0], expected_pool[0, 1:, 0]) < 5e-3
        np.testing.assert_array_equal(after[0, :, 1], states[0, :, 1])
