"""mamba2_replay against the recurrence in float64, and its kernel against its reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2 import SMALL, one_row, operands, oracle, spoil
from regions import decode_region
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.replay import mamba2_replay, mamba2_replay_reference
from jaxspec.pallas.mamba2.ring import Mamba2Ring
from jaxspec.pallas.mamba2.step import mamba2_step
from jaxspec.pallas.mamba2.tokens import Mamba2Tokens
from jaxspec.pallas.recurrent.replay import default_window, must_fold, next_ring_length
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes

LAYERS, SLOTS, WIDTH = 2, 5, 4

replay = jax.jit(mamba2_replay, static_argnums=3)
reference = jax.jit(mamba2_replay_reference, static_argnums=3)


def pools(make, shape=SMALL, dtype=jnp.float32, *, width=WIDTH, window=8, slots=SLOTS):
    """Checkpoints and ring; `make(shape)` gives their elements. `window` None: the default."""
    window = window or default_window(jnp.dtype(dtype).itemsize)
    rows = window + width

    def pool(dtype, *dims):
        return jnp.asarray(make((LAYERS, slots, *dims)), dtype)

    return pool(dtype, 1, shape.heads, shape.head_dim, shape.state_dim), Mamba2Ring(
        x=pool(dtype, rows, shape.heads, shape.head_dim),
        b=pool(dtype, rows, shape.groups, shape.state_dim),
        dt=abs(pool(jnp.float32, rows, shape.heads)),
        window=window,
    )


def nan(dims):
    return np.full(dims, np.nan)


def walk(run, rng, pools, widths, kept_of, *, shape=SMALL, padded=False, decay=1.0):
    """Steps of these widths with rows that change places; outputs are the oracle's to 1e-5.

    `kept_of(real)`: how many of a step's `real` tokens stand. `padded`: steps may have fewer tokens
    than their width, and the others are NaN. `decay`: a factor on A; with a small one the oldest
    tokens of a ring still count. Returns the pools, and how often a row folded.
    """
    states, ring = pools
    slots = (1, 3, 4)
    states = states.at[1, slots, 0].set(0.0)
    true = {slot: np.zeros(states.shape[3:]) for slot in slots}
    computed, length = dict.fromkeys(slots, 5), dict.fromkeys(slots, 0)
    heads, folds = operands(rng, shape=shape)[2::3], 0
    heads[0] *= np.float32(decay)
    for width in widths:
        order = rng.permutation(slots)
        query_len = rng.integers(0, width + 1, size=3) if padded else np.full(3, width)
        new = operands(rng, 3, width, shape=shape)
        new[2::3] = heads
        for index, real in enumerate(query_len):
            spoil(new, index, real)
        rows = decode_region(
            order,
            query_len,
            num_computed=[computed[slot] for slot in order],
            ring_length=[length[slot] for slot in order],
        )
        out, states, ring = run(Mamba2Tokens(*new), states, ring, 1, rows)
        for index, slot in enumerate(order):
            if not (real := query_len[index]):
                continue
            expected, after = oracle(true[slot], *one_row(new, index, real))
            np.testing.assert_allclose(out[index, :real], expected, atol=1e-5)
            kept = kept_of(real)
            folds += bool(must_fold(length[slot], width, ring.window))
            length[slot] = int(next_ring_length(length[slot], kept, width, ring.window))
            true[slot], computed[slot] = after[kept - 1], computed[slot] + kept
    return states, ring, folds


def kept_by(acceptance, rng):
    return {
        "none": lambda real: 1,
        "all": lambda real: real,
        "random": lambda real: int(rng.integers(1, real + 1)),
    }[acceptance]


@pytest.mark.parametrize("acceptance", ["none", "all", "random"])
def test_a_state_replayed_equals_a_state_never_advanced(acceptance):
    """Over many folds, with rows that change places and steps of fewer tokens.

    The pool begins full of NaN: nothing that was not written is read.
    """
    rng = np.random.default_rng(0)
    kept_of = kept_by(acceptance, rng)
    states, _, folds = walk(replay, rng, pools(nan), [WIDTH] * 300, kept_of, padded=True)
    assert folds > 60
    assert np.isnan(states[0]).all() and np.isnan(states[1, (0, 2), 0]).all()


@pytest.mark.parametrize("narrow", [31, 32, 33, 35, 70, None])
def test_steps_of_several_widths_share_a_ring(narrow):
    """A wide step after so many narrow ones, as fill a window of 32; None: widths at random."""
    rng = np.random.default_rng(narrow)
    widths = rng.integers(1, WIDTH + 1, 150) if narrow is None else [1] * narrow + [WIDTH, 1, WIDTH]
    held = pools(nan, window=None)
    _, _, folds = walk(replay, rng, held, widths, lambda real: real, decay=0.1)
    assert folds >= 3


@pytest.mark.parametrize("acceptance", ["none", "all", "random"])
def test_replay_equals_snapshots(acceptance):
    rng = np.random.default_rng(2)
    kept_of = kept_by(acceptance, rng)
    checkpoints, ring = pools(np.zeros)
    snapshots = jnp.zeros((*checkpoints.shape[:2], WIDTH, *checkpoints.shape[3:]))
    heads, computed, length, offset = operands(rng)[2::3], 0, 0, 0
    for _ in range(40):
        new = operands(rng, 1, WIDTH)
        new[2::3] = heads
        rows = decode_region(
            [3], WIDTH, num_computed=computed, ring_length=length, state_offset=offset
        )
        out, checkpoints, ring = replay(Mamba2Tokens(*new), checkpoints, ring, 0, rows)
        want, snapshots = step(Mamba2Tokens(*new), snapshots, 0, rows)
        np.testing.assert_allclose(out, want, atol=1e-5)
        kept = kept_of(WIDTH)
        length = int(next_ring_length(length, kept, WIDTH, ring.window))
        computed, offset = computed + kept, kept - 1


step = jax.jit(mamba2_step, static_argnums=2)


@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_rounding_does_not_add_up(dtype, error):
    """4,000 tokens with random acceptance: relative error against float64, in every quarter."""
    rng, shape = np.random.default_rng(1), Mamba2Shape(2, 1, head_dim=16, state_dim=32)
    states, ring = pools(np.zeros, shape, dtype, window=None)
    heads, computed, length = operands(rng, shape=shape)[2::3], 0, 0
    heads[0] = np.float32([-0.1, -0.02])  # both remember hundreds of tokens
    exact, wrong, right = np.zeros(states.shape[3:]), [], []
    while computed < 4000:
        new = operands(rng, 1, WIDTH, shape=shape)
        new[2::3] = heads
        rows = decode_region([1], WIDTH, num_computed=computed, ring_length=length)
        out, states, ring = replay(Mamba2Tokens(*new), states, ring, 0, rows)
        expected, after = oracle(exact, *one_row(new, 0))
        wrong.append(np.linalg.norm(out[0] - expected))
        right.append(np.linalg.norm(expected))
        kept = int(rng.integers(1, WIDTH + 1))
        exact, computed = after[kept - 1], computed + kept
        length = int(next_ring_length(length, kept, WIDTH, ring.window))
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
        rows = decode_region([2], WIDTH, num_computed=length, ring_length=length)
        out, states, ring = replay(Mamba2Tokens(*new), states, ring, 1, rows)
        expected, after = oracle(exact, *one_row(new, 0))
        np.testing.assert_allclose(out[0], expected, atol=2e-6)
        exact = after[-1]


def test_padding_is_inert():
    """Slots, positions, lengths of padding may be anything; its tokens may be NaN."""
    rng = np.random.default_rng(1)
    before = pools(lambda dims: rng.normal(size=dims))
    new = Mamba2Tokens(*(jnp.full_like(y, jnp.nan) for y in operands(rng, 5, WIDTH)))
    garbage = [10**6, -5, 2**31 - 1, -(2**31), 7]
    slots, query_len = [0, 0, 3, -2, 10**6], [4, 0, 0, 4, 4]
    rows = decode_region(slots, query_len, num_computed=garbage, ring_length=garbage[::-1])
    _, *after = replay(new, *before, 1, rows)
    jax.tree.map(np.testing.assert_array_equal, tuple(after), before)


def test_a_token_that_overflows_harms_no_token_before_it_nor_another_row():
    rng = np.random.default_rng(5)
    before = pools(lambda dims: rng.normal(size=dims))
    new = operands(rng, 2, WIDTH)
    rows = decode_region([2, 3], WIDTH, num_computed=9, ring_length=[3, 5])
    want, _, expected = replay(Mamba2Tokens(*new), *before, 1, rows)
    spoil(new, 0, 2)
    out, _, after = replay(Mamba2Tokens(*new), *before, 1, rows)
    np.testing.assert_array_equal(out[0, :2], want[0, :2])
    np.testing.assert_array_equal(out[1], want[1])
    np.testing.assert_array_equal(after.x[1, 2, 9:11], expected.x[1, 2, 9:11])
    assert np.isnan(out[0, 2:]).all()


def test_a_ring_too_small_for_its_steps_is_refused():
    new = Mamba2Tokens(*operands(np.random.default_rng(0), 1, WIDTH))
    rows = decode_region([1], 1, num_computed=1, ring_length=1)
    states, ring = pools(np.zeros, width=WIDTH - 1)
    with pytest.raises(ValueError, match="has 11 rows. Build it with at least 12"):
        mamba2_replay(new, states, ring, 0, rows)
    with pytest.raises(ValueError, match="a window of at least 4"):
        mamba2_replay(new, states, dataclasses.replace(ring, window=3), 0, rows)


def test_states_may_have_more_rows_a_head_than_x():
    """As for heads of 80 in pools for 128: the rest is zeros, and stays so."""
    rng = np.random.default_rng(7)
    states, ring = pools(lambda dims: rng.normal(size=dims))
    wide = jnp.pad(states, [(0, 0)] * 4 + [(0, 3), (0, 0)])
    wide_ring = dataclasses.replace(ring, x=jnp.pad(ring.x, [(0, 0)] * 4 + [(0, 3)]))
    new, rows = operands(rng, 2, WIDTH), decode_region([2, 3], WIDTH, ring_length=[3, 8])
    want, *expected = replay(Mamba2Tokens(*new), states, ring, 1, rows)
    out, *after = replay(Mamba2Tokens(*new), wide, wide_ring, 1, rows)
    np.testing.assert_allclose(out, want, atol=1e-6)
    for pool, narrow, axis in ((after[0], expected[0], 4), (after[1].x, expected[1].x, 4)):
        own, rest = jnp.split(pool, [SMALL.head_dim], axis=axis)
        np.testing.assert_allclose(own, narrow, atol=1e-6)
        assert not np.any(rest)


# The kernel. Rows: three tokens on a ring that goes round its end, two tokens; padding by slot, by
# length, by a slot that is not there, by a negative one; one token on a full ring, which folds; a
# length out of range on an empty one; on a ring of one token.
WINDOW = 12
ROWS = decode_region(
    slots=[2, 4, 0, 3, 9, -1, 6, 1, 5],
    query_len=[3, 2, 3, 0, 3, 3, 1, 99, 1],
    num_computed=[2**20 + 3, 40, -(2**31), 1, 2, 2**31 - 1, 31, 5, 18],
    ring_length=[WINDOW - 3, 3, 10**6, 1, -5, 2**31 - 1, WINDOW, 0, 1],
)
REAL = {0: 3, 1: 2, 6: 1, 7: 99, 8: 1}  # tokens of the rows that are not padding


def kernel_case(shape, dtype, x_dtype, width, seed=0):
    """NaN in padding tokens, padding rows, row 0's neighbour 1, and all that no ring counts."""
    rng = np.random.default_rng(seed)
    new = operands(rng, len(ROWS.slots), width, shape=shape)
    for index in range(len(ROWS.slots)):
        spoil(new, index, REAL.get(index, 0))
    spoil(new, 1)
    x, dt, a, b, c, d = new
    x, b, c = (jnp.asarray(y, x_dtype) for y in (x, b, c))
    states, ring = pools(
        lambda dims: rng.normal(size=dims) * 0.3, shape, dtype, width=width, window=WINDOW, slots=7
    )
    rows = ring.num_rows
    counted = np.zeros((7, rows), bool)
    for index in REAL:
        end, length = int(ROWS.num_computed[index]), int(ROWS.ring_length[index])
        counted[ROWS.slots[index], [p % rows for p in range(end - length, end)]] = True
    ring = jax.tree.map(
        lambda y: jnp.where(counted[None, :, :, *[None] * (y.ndim - 3)], y, jnp.nan), ring
    )
    return Mamba2Tokens(x, dt, a, b, c, d), states, ring


def check(new, states, ring, run):
    """`run` is the reference: in outputs, in checkpoints, and bit for bit in the ring."""
    width, tolerance = new.x.shape[1], 8 * float(jnp.finfo(states.dtype).eps)
    want, folded, appended = reference(new, states, ring, 1, ROWS)
    out, after, ring_after = run(new, states, ring, 1, ROWS)
    rings = (jax.tree.map(lambda y: np.asarray(y, np.float32), y) for y in (ring_after, appended))
    jax.tree.map(np.testing.assert_array_equal, *rings)
    before, after, folded = (np.asarray(y, np.float32) for y in (states, after, folded))
    np.testing.assert_allclose(after, folded, rtol=tolerance, atol=2e-6)
    kept = np.ones(before.shape[:2], bool)
    folds = must_fold(ROWS.ring_length, width, WINDOW)
    kept[1, [ROWS.slots[index] for index in REAL if folds[index]]] = False
    np.testing.assert_array_equal(after[kept], before[kept])
    assert not kept[1, 6] and not np.array_equal(after[1, 6], before[1, 6])
    out = np.asarray(out)
    for index, count in REAL.items():
        count = min(count, width)
        if index == 1:  # all its inputs are NaN
            assert np.isnan(out[index, :count]).all()
            continue
        np.testing.assert_allclose(out[index, :count], want[index, :count], rtol=1e-6, atol=1e-5)
    padding = [index for index in range(len(out)) if index not in REAL]
    assert not np.any(out[padding])  # no uninitialised memory comes out


def by_kernel(**options):
    from jaxspec.pallas.mamba2.replay_kernel import mamba2_replay_kernel

    def run(tokens, states, ring, layer, rows):
        return mamba2_replay_kernel(tokens, states, ring, jnp.int32(layer), rows, **options)

    return run


@pytest.mark.mosaic
@pytest.mark.parametrize("block_heads", [1, 2, None])
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
    dtype, x_dtype, head_dim, state_dim, width, block_heads
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = Mamba2Shape(4, 2, head_dim, state_dim)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    run = by_kernel(interpret=interpret, block_heads=block_heads)
    check(*kernel_case(shape, dtype, x_dtype, width), run)
    assert not get_races().races_found


@pytest.mark.mosaic
def test_the_kernel_takes_steps_of_several_widths_on_one_ring():
    """A ring that narrow steps have filled is read by a wide one as far as its window goes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = Mamba2Shape(2, 1, 64, 64)
    run, rng = by_kernel(interpret=plgpu.InterpretGPUParams()), np.random.default_rng(0)
    widths = [1] * 8 + [4] + [1] * 5 + [4]
    held = pools(nan, shape)
    _, _, folds = walk(run, rng, held, widths, lambda real: real, shape=shape, decay=0.1)
    assert folds >= 3


COMPILED_CASES = [  # shape, dtypes of states and of tokens, width
    (MAMBA2["nemotron-3-nano"], dtype, x_dtype, width)
    for dtype, x_dtype in (
        (jnp.float32, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.bfloat16),
    )
    for width in (1, 4, 8)
] + [
    *((MAMBA2["nemotron-h-8b"], jnp.float32, jnp.bfloat16, width) for width in (1, 4, 8)),
    (Mamba2Shape(4, 2, 128, 64), jnp.float32, jnp.bfloat16, 8),
    (Mamba2Shape(4, 2, 128, 64), jnp.float16, jnp.float32, 1),
]


@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize(("shape", "dtype", "x_dtype", "width"), COMPILED_CASES, ids=str)
def test_it_compiles_for_an_h200(
    h200, monkeypatch, capfd, shape, dtype, x_dtype, width, block_heads
):
    from jaxspec.pallas.mamba2.replay_kernel import mamba2_replay_kernel

    def step(tokens, states, ring, rows):
        for layer in range(2):
            out, states, ring = mamba2_replay_kernel(
                tokens, states, ring, jnp.int32(layer), rows, block_heads=block_heads
            )
            tokens = tokens._replace(x=out.astype(x_dtype))
        return out, states, ring

    x = array(4, width, shape.heads, shape.head_dim, dtype=x_dtype)
    b = array(4, width, shape.groups, shape.state_dim, dtype=x_dtype)
    a = array(shape.heads)
    tokens = Mamba2Tokens(x, array(4, width, shape.heads), a, b, b, a)
    held = jax.eval_shape(
        lambda: pools(jnp.zeros, shape, dtype, width=width, window=None, slots=33)
    )
    operands = tokens, *held, DecodeRegion(*[array(4, dtype=jnp.int32)] * 5)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=(1, 2))
    assert_lean(compiled, capfd.readouterr().out, held)


@pytest.mark.mosaic
def test_two_heads_share_a_block_where_they_can_and_it_pays():
    from jaxspec.pallas.mamba2.replay_kernel import _block_heads

    assert _block_heads(heads=133, group=8, window=17, state_bytes=2**15) == 2
    assert _block_heads(heads=132, group=8, window=17, state_bytes=2**15) == 1
    assert _block_heads(heads=133, group=7, window=17, state_bytes=2**15) == 1
    assert _block_heads(heads=133, group=8, window=16, state_bytes=2**15) == 1
    assert _block_heads(heads=133, group=8, window=17, state_bytes=2**16) == 1


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
@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("shape", [MAMBA2["nemotron-3-nano"], Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_one_head_a_block_and_two_equal_the_reference(shape, dtype, width, block_heads):
    case = kernel_case(shape, dtype, jnp.bfloat16, width, seed=width)
    check(*case, by_kernel(block_heads=block_heads))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_on_a_gpu_many_steps_equal_float64(dtype, error):
    """Random acceptance and folds for 4,000 tokens, two rows, of which one is checked."""
    rng, shape = np.random.default_rng(4), Mamba2Shape(4, 2)
    states, ring = pools(np.zeros, shape, dtype, window=None)
    heads, computed, length = operands(rng, shape=shape)[2::3], 0, 0
    exact, wrong, right = np.zeros(states.shape[3:]), [], []
    while computed < 4000:
        new = operands(rng, 2, WIDTH, shape=shape)
        new[2::3] = heads
        rows = decode_region(
            [3, 1], [WIDTH, 2], num_computed=[computed, 7], ring_length=[length, 5]
        )
        out, states, ring = replay(Mamba2Tokens(*new), states, ring, 1, rows)
        expected, after = oracle(exact, *one_row(new, 0))
        wrong.append(np.linalg.norm(out[0] - expected))
        right.append(np.linalg.norm(expected))
        kept = int(rng.integers(1, WIDTH + 1))
        exact, computed = after[kept - 1], computed + kept
        length = int(next_ring_length(length, kept, WIDTH, ring.window))
    quarters = [np.sqrt(np.mean(np.square(x))) for x in np.array_split(wrong, 4)]
    assert max(quarters) < error * np.sqrt(np.mean(np.square(right)))
    assert quarters[-1] < 1.5 * quarters[0]  # rounding does not add up
