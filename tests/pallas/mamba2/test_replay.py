"""mamba2_replay against the recurrence in float64, and its kernel against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2 import SMALL, int32, one_row, operands, oracle, spoil
from regions import decode_region

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.replay import (
    Mamba2Ring,
    mamba2_replay,
    mamba2_replay_reference,
)
from jaxspec.pallas.mamba2.step import mamba2_step
from jaxspec.pallas.mamba2.tokens import Mamba2Tokens
from jaxspec.pallas.recurrent.replay import must_fold, next_ring_length, ring_rows

LAYERS, SLOTS, WIDTH = 2, 5, 4

replay = jax.jit(mamba2_replay, static_argnums=8)
reference = jax.jit(mamba2_replay_reference, static_argnums=8)


def pools(make, shape=SMALL, dtype=jnp.float32, rows=12, slots=SLOTS):
    """Checkpoints and ring; `make(shape)` gives their elements."""

    def pool(dtype, *dims):
        return jnp.asarray(make((LAYERS, slots, *dims)), dtype)

    return pool(dtype, 1, shape.heads, shape.head_dim, shape.state_dim), Mamba2Ring(
        x=pool(dtype, rows, shape.heads, shape.head_dim),
        b=pool(dtype, rows, shape.groups, shape.state_dim),
        dt=abs(pool(jnp.float32, rows, shape.heads)),
    )


@pytest.mark.parametrize("acceptance", ["none", "all", "random"])
def test_a_state_replayed_equals_a_state_never_advanced(acceptance):
    """Over many folds, with rows that change places and steps of fewer tokens.

    The pool begins full of NaN: nothing that was not written is read.
    """
    rng = np.random.default_rng(0)
    states, ring = pools(lambda dims: np.full(dims, np.nan))
    slots = (1, 3, 4)
    states = states.at[1, slots, 0].set(0.0)
    true = {slot: np.zeros(states.shape[3:]) for slot in slots}
    computed, length = dict.fromkeys(slots, 5), dict.fromkeys(slots, 0)
    heads, folds = operands(rng)[2::3], 0
    for _ in range(300):
        rows = rng.permutation(slots)
        query_len = rng.integers(0, WIDTH + 1, size=3)
        new = operands(rng, 3, WIDTH)
        new[2::3] = heads
        for index, real in enumerate(query_len):
            spoil(new, index, real)
        index = (int32(*(facts[r] for r in rows)) for facts in (computed, length))
        out, states, ring = replay(*new, states, ring, 1, int32(*rows), *index, int32(*query_len))
        for index, slot in enumerate(rows):
            if not (real := query_len[index]):
                continue
            expected, after = oracle(true[slot], *one_row(new, index, real))
            np.testing.assert_allclose(out[index, :real], expected, atol=1e-5)
            kept = {"none": 1, "all": real, "random": int(rng.integers(1, real + 1))}[acceptance]
            folds += bool(must_fold(length[slot], WIDTH, 12))
            length[slot] = int(next_ring_length(length[slot], kept, WIDTH, 12))
            true[slot], computed[slot] = after[kept - 1], computed[slot] + kept
    assert folds > 60
    assert np.isnan(states[0]).all() and np.isnan(states[1, (0, 2), 0]).all()


@pytest.mark.parametrize("acceptance", ["none", "all", "random"])
def test_replay_equals_snapshots(acceptance):
    rng = np.random.default_rng(2)
    checkpoints, ring = pools(np.zeros)
    snapshots = jnp.zeros((*checkpoints.shape[:2], WIDTH, *checkpoints.shape[3:]))
    heads, computed, length, offset = operands(rng)[2::3], 0, 0, 0
    for _ in range(40):
        new = operands(rng, 1, WIDTH)
        new[2::3] = heads
        index = int32(computed), int32(length), int32(WIDTH)
        out, checkpoints, ring = replay(*new, checkpoints, ring, 0, int32(3), *index)
        rows = decode_region([3], WIDTH, state_offset=offset)
        want, snapshots = step(Mamba2Tokens(*new), snapshots, 0, rows)
        np.testing.assert_allclose(out, want, atol=1e-5)
        kept = {"none": 1, "all": WIDTH, "random": int(rng.integers(1, WIDTH + 1))}[acceptance]
        length = int(next_ring_length(length, kept, WIDTH, 12))
        computed, offset = computed + kept, kept - 1


step = jax.jit(mamba2_step, static_argnums=2)


@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_rounding_does_not_add_up(dtype, error):
    """4,000 tokens with random acceptance: relative error against float64, in every quarter."""
    rng, shape = np.random.default_rng(1), Mamba2Shape(2, 1, head_dim=16, state_dim=32)
    rows = ring_rows(WIDTH, jnp.dtype(dtype).itemsize)
    states, ring = pools(np.zeros, shape, dtype, rows)
    heads, computed, length = operands(rng, shape=shape)[2::3], 0, 0
    heads[0] = np.float32([-0.1, -0.02])  # both remember hundreds of tokens
    exact, wrong, right = np.zeros(states.shape[3:]), [], []
    while computed < 4000:
        new = operands(rng, 1, WIDTH, shape=shape)
        new[2::3] = heads
        index = int32(1), int32(computed), int32(length), int32(WIDTH)
        out, states, ring = replay(*new, states, ring, 0, *index)
        expected, after = oracle(exact, *one_row(new, 0))
        wrong.append(np.linalg.norm(out[0] - expected))
        right.append(np.linalg.norm(expected))
        kept = int(rng.integers(1, WIDTH + 1))
        exact, computed = after[kept - 1], computed + kept
        length = int(next_ring_length(length, kept, WIDTH, rows))
    quarters = [np.sqrt(np.mean(np.square(y))) for y in np.array_split(wrong, 4)]
    typical = np.sqrt(np.mean(np.square(right)))
    assert max(quarters) < error * typical
    assert quarters[-1] < 1.5 * quarters[0]


@pytest.mark.parametrize("step_size", [300.0, 1e5])
def test_a_strong_decay_keeps_what_follows_exact(step_size):
    rng = np.random.default_rng(6)
    states, ring = pools(np.zeros)
    exact, heads = np.zeros(states.shape[3:]), operands(rng)[2::3]
    for length in (0, WIDTH, 2 * WIDTH):
        new = operands(rng, 1, WIDTH)
        new[2::3] = heads
        new[0][0, 1], new[1][0, 1] = 0.0, step_size
        index = int32(2), int32(length), int32(length), int32(WIDTH)
        out, states, ring = replay(*new, states, ring, 1, *index)
        expected, after = oracle(exact, *one_row(new, 0))
        np.testing.assert_allclose(out[0], expected, atol=2e-6)
        exact = after[-1]


def test_padding_is_inert():
    """Slots, positions, lengths of padding may be anything; its tokens may be NaN."""
    rng = np.random.default_rng(1)
    before = pools(lambda dims: rng.normal(size=dims))
    new = [jnp.full_like(y, jnp.nan) for y in operands(rng, 5, WIDTH)]
    garbage = int32(10**6, -5, 2**31 - 1, -(2**31), 7)
    slots, query_len = int32(0, 0, 3, -2, 10**6), int32(4, 0, 0, 4, 4)
    _, *after = replay(*new, *before, 1, slots, garbage, garbage[::-1], query_len)
    jax.tree.map(np.testing.assert_array_equal, tuple(after), before)


def test_a_token_that_overflows_harms_no_token_before_it_nor_another_row():
    rng = np.random.default_rng(5)
    before = pools(lambda dims: rng.normal(size=dims))
    new = operands(rng, 2, WIDTH)
    index = int32(2, 3), int32(9, 9), int32(3, 5), int32(WIDTH, WIDTH)
    want, _, expected = replay(*new, *before, 1, *index)
    spoil(new, 0, 2)
    out, _, after = replay(*new, *before, 1, *index)
    np.testing.assert_array_equal(out[0, :2], want[0, :2])
    np.testing.assert_array_equal(out[1], want[1])
    np.testing.assert_array_equal(after.x[1, 2, 9:11], expected.x[1, 2, 9:11])
    assert np.isnan(out[0, 2:]).all()


def test_a_ring_too_small_for_its_steps_is_refused():
    new = operands(np.random.default_rng(0), 1, WIDTH)
    with pytest.raises(ValueError, match="ring_rows >= 8"):
        mamba2_replay(*new, *pools(np.zeros, rows=7), 0, *[int32(1)] * 4)


# The kernel. Rows: three tokens on a ring that goes round its end, two tokens; padding by slot, by
# length, by a slot that is not there, by a negative one; one token on a full ring, which folds; a
# length out of range on an empty one; on a ring of one token.
WINDOW = 12
ROWS = {
    "slots": int32(2, 4, 0, 3, 9, -1, 6, 1, 5),
    "num_computed": int32(2**20 + 3, 40, -(2**31), 1, 2, 2**31 - 1, 31, 5, 18),
    "ring_length": int32(WINDOW - 3, 3, 10**6, 1, -5, 2**31 - 1, WINDOW, 0, 1),
    "query_len": int32(3, 2, 3, 0, 3, 3, 1, 99, 1),
}
REAL = {0: 3, 1: 2, 6: 1, 7: 99, 8: 1}  # tokens of the rows that are not padding


def kernel_case(shape, dtype, x_dtype, width, seed=0):
    """NaN in padding tokens, padding rows, row 0's neighbour 1, and all that no ring counts."""
    rng = np.random.default_rng(seed)
    new = operands(rng, len(ROWS["slots"]), width, shape=shape)
    for index in range(len(ROWS["slots"])):
        spoil(new, index, REAL.get(index, 0))
    spoil(new, 1)
    x, dt, a, b, c, d = new
    x, b, c = (jnp.asarray(y, x_dtype) for y in (x, b, c))
    rows = WINDOW + width
    states, ring = pools(lambda dims: rng.normal(size=dims) * 0.3, shape, dtype, rows, slots=7)
    counted = np.zeros((7, rows), bool)
    for index in REAL:
        end, length = int(ROWS["num_computed"][index]), int(ROWS["ring_length"][index])
        counted[ROWS["slots"][index], [p % rows for p in range(end - length, end)]] = True
    ring = jax.tree.map(
        lambda y: jnp.where(counted[None, :, :, *[None] * (y.ndim - 3)], y, jnp.nan), ring
    )
    return [x, dt, a, b, c, d], states, ring


def check(new, states, ring, run):
    """`run` is the reference: in outputs, in checkpoints, and bit for bit in the ring."""
    width, tolerance = new[0].shape[1], 8 * float(jnp.finfo(states.dtype).eps)
    want, folded, appended = reference(*new, states, ring, 1, *ROWS.values())
    out, after, ring_after = run(*new, states, ring, 1, *ROWS.values())
    rings = (jax.tree.map(lambda y: np.asarray(y, np.float32), y) for y in (ring_after, appended))
    jax.tree.map(np.testing.assert_array_equal, *rings)
    before, after, folded = (np.asarray(y, np.float32) for y in (states, after, folded))
    np.testing.assert_allclose(after, folded, rtol=tolerance, atol=2e-6)
    kept = np.ones(before.shape[:2], bool)
    folds = must_fold(ROWS["ring_length"], width, WINDOW + width)
    kept[1, [ROWS["slots"][index] for index in REAL if folds[index]]] = False
    np.testing.assert_array_equal(after[kept], before[kept])
    assert not kept[1, 6] and not np.array_equal(after[1, 6], before[1, 6])
    out = np.asarray(out)
    for index, count in REAL.items():
        count = min(count, width)
        if index == 1:  # all its inputs are NaN
            assert np.isnan(out[index, :count]).all()
            continue
        np.testing.assert_allclose(out[index, :count], want[index, :count], rtol=0, atol=1e-5)
    padding = [index for index in range(len(out)) if index not in REAL]
    assert not np.any(out[padding])  # no uninitialised memory comes out


def by_kernel(**options):
    from jaxspec.pallas.mamba2.replay_kernel import replay

    return lambda *args: replay(*args[:8], jnp.int32(args[8]), *args[9:], **options)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize("together", [1, 2, None])
@pytest.mark.parametrize(
    ("dtype", "x_dtype", "head_dim", "state_dim", "width"),
    [
        (jnp.float32, jnp.float32, 64, 128, 3),
        (jnp.float32, jnp.bfloat16, 64, 64, 8),
        (jnp.bfloat16, jnp.bfloat16, 64, 128, 4),
        (jnp.float16, jnp.float32, 128, 64, 1),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    dtype, x_dtype, head_dim, state_dim, width, together
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = Mamba2Shape(4, 2, head_dim, state_dim)
    run = by_kernel(interpret=plgpu.InterpretGPUParams(detect_races=True), together=together)
    check(*kernel_case(shape, dtype, x_dtype, width), run)
    assert not get_races().races_found


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")
def test_two_heads_share_a_block_where_they_can_and_it_pays():
    from jaxspec.pallas.mamba2.replay_kernel import _together

    assert _together(heads=133, group=8, window=17, state_bytes=2**15) == 2
    assert _together(heads=132, group=8, window=17, state_bytes=2**15) == 1
    assert _together(heads=133, group=7, window=17, state_bytes=2**15) == 1
    assert _together(heads=133, group=8, window=16, state_bytes=2**15) == 1
    assert _together(heads=133, group=8, window=17, state_bytes=2**16) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*MAMBA2.values(), Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, x_dtype, width):
    dispatch._chosen.pop("mamba2_replay", None)
    check(*kernel_case(shape, dtype, x_dtype, width, seed=width), replay)
    assert dispatch.implementations()["mamba2_replay"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("shape", [MAMBA2["nemotron-3-nano"], Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_one_head_a_block_and_two_equal_the_reference(shape, dtype, width, together):
    case = kernel_case(shape, dtype, jnp.bfloat16, width, seed=width)
    check(*case, by_kernel(together=together))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_on_a_gpu_many_steps_equal_float64(dtype, error):
    """Random acceptance and folds for 4,000 tokens, two rows, of which one is checked."""
    rng, shape = np.random.default_rng(4), Mamba2Shape(4, 2)
    rows = ring_rows(WIDTH, jnp.dtype(dtype).itemsize)
    states, ring = pools(np.zeros, shape, dtype, rows)
    heads, computed, length = operands(rng, shape=shape)[2::3], 0, 0
    exact, wrong, right = np.zeros(states.shape[3:]), [], []
    while computed < 4000:
        new = operands(rng, 2, WIDTH, shape=shape)
        new[2::3] = heads
        index = int32(3, 1), int32(computed, 7), int32(length, 5), int32(WIDTH, 2)
        out, states, ring = replay(*new, states, ring, 1, *index)
        expected, after = oracle(exact, *one_row(new, 0))
        wrong.append(np.linalg.norm(out[0] - expected))
        right.append(np.linalg.norm(expected))
        kept = int(rng.integers(1, WIDTH + 1))
        exact, computed = after[kept - 1], computed + kept
        length = int(next_ring_length(length, kept, WIDTH, rows))
    quarters = [np.sqrt(np.mean(np.square(x))) for x in np.array_split(wrong, 4)]
    assert max(quarters) < error * np.sqrt(np.mean(np.square(right)))
    assert quarters[-1] < 1.5 * quarters[0]  # rounding does not add up
