"""mamba2_step against the recurrence in float64, and its kernel against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2 import SMALL, one_row, operands, oracle, spoil
from regions import decode_region

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.step import mamba2_step, mamba2_step_reference
from jaxspec.pallas.mamba2.step_kernel import mamba2_step_kernel
from jaxspec.pallas.mamba2.tokens import Mamba2Tokens

LAYERS, SLOTS, CANDIDATES = 2, 5, 4
POOL = (LAYERS, SLOTS, CANDIDATES, SMALL.heads, SMALL.head_dim, SMALL.state_dim)

step = jax.jit(mamba2_step, static_argnums=2)
reference = jax.jit(mamba2_step_reference, static_argnums=2)


def draw_tokens(rng, *batch, shape=SMALL):
    """Tokens as a layer makes them, in NumPy arrays that a test may change."""
    return Mamba2Tokens(*operands(rng, *batch, shape=shape))


def test_a_state_rolled_back_equals_a_state_never_advanced():
    rng = np.random.default_rng(0)
    states = jnp.zeros(POOL)
    true = {slot: np.zeros(POOL[3:]) for slot in (1, 3, 4)}
    offset = dict.fromkeys(true, 0)
    for _ in range(20):
        slots = rng.permutation(list(true))  # rows may change every step; slots stay
        query_len = rng.integers(0, CANDIDATES + 1, size=3)
        new = draw_tokens(rng, 3, CANDIDATES)
        region = decode_region(slots, query_len, state_offset=[offset[slot] for slot in slots])
        out, states = step(new, states, 1, region)
        for row, slot in enumerate(slots):
            if real := query_len[row]:
                expected, after = oracle(true[slot], *one_row(new, row, real))
                np.testing.assert_allclose(out[row, :real], expected, atol=1e-5)
                offset[slot] = int(rng.integers(0, real))  # drafts accepted
                true[slot] = after[offset[slot]]
                np.testing.assert_allclose(states[1, slot, offset[slot]], true[slot], atol=1e-5)
    assert not np.any(states[0])


def test_a_token_that_overflows_harms_no_token_before_it_nor_another_row():
    rng = np.random.default_rng(5)
    states = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    new = draw_tokens(rng, 2, CANDIDATES)
    rows = decode_region([2, 3], CANDIDATES, state_offset=[0, 1])
    want, expected = step(new, states, 1, rows)
    spoil(new, 0, 2)
    out, after = step(new, states, 1, rows)
    np.testing.assert_array_equal(out[0, :2], want[0, :2])
    np.testing.assert_array_equal(out[1], want[1])
    np.testing.assert_array_equal(after[1, 2, :2], expected[1, 2, :2])
    np.testing.assert_array_equal(after[1, 3], expected[1, 3])
    assert np.isnan(after[1, 2, 2:]).all()


@pytest.mark.parametrize("step_size", [300.0, 1e5])
def test_a_strong_decay_keeps_what_follows_exact(step_size):
    rng = np.random.default_rng(6)
    states = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    new = draw_tokens(rng, 1, CANDIDATES)
    new.x[0, 1], new.dt[0, 1] = 0.0, step_size
    out, after = step(new, states, 1, decode_region([2], CANDIDATES))
    want, expected = oracle(np.asarray(states[1, 2, 0]), *one_row(new, 0))
    np.testing.assert_allclose(out[0], want, atol=1e-6)
    np.testing.assert_allclose(after[1, 2], expected, atol=1e-6)


def test_padding_is_inert():
    rng = np.random.default_rng(1)
    states = rng.normal(size=POOL).astype(np.float32)
    new = jax.tree.map(lambda y: jnp.full_like(y, jnp.nan), draw_tokens(rng, 5, CANDIDATES))
    garbage = [10**6, -5, 2**31 - 1, -(2**31), 7]
    rows = decode_region([0, 0, 3, -2, 10**6], [4, 0, 0, 4, 4], state_offset=garbage)
    _, after = step(new, jnp.asarray(states), 1, rows)
    np.testing.assert_array_equal(after, states)


def test_a_padding_token_is_never_stored():
    rng = np.random.default_rng(2)
    states = rng.normal(size=POOL).astype(np.float32)
    new = draw_tokens(rng, 2, CANDIDATES)
    spoil(new, 0, 2)  # row 0 has two tokens
    spoil(new, 1)  # row 1 is padding
    out, after = step(new, jnp.asarray(states), 1, decode_region([2, 0], [2, 4]))
    assert np.isfinite(after).all() and np.isfinite(out[0, :2]).all()
    np.testing.assert_array_equal(after[1, 2, 2:], states[1, 2, 2:])


def test_more_tokens_than_candidates_are_refused():
    new = draw_tokens(np.random.default_rng(0), 1, CANDIDATES + 1)
    with pytest.raises(ValueError, match="num_drafts >= 4"):
        mamba2_step(new, jnp.zeros(POOL), 0, decode_region([1], 1))


def test_states_may_have_more_rows_a_head_than_x():
    """As for heads of 80 in pools for 128: the rest is zeros, and stays so."""
    rng = np.random.default_rng(7)
    narrow = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    wide = jnp.pad(narrow, [(0, 0)] * 4 + [(0, 3), (0, 0)])
    new, rows = draw_tokens(rng, 2, CANDIDATES), decode_region([2, 3], CANDIDATES, state_offset=1)
    want, expected = step(new, narrow, 1, rows)
    out, after = step(new, wide, 1, rows)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(after[..., : SMALL.head_dim, :], expected, atol=1e-6)
    assert not np.any(after[..., SMALL.head_dim :, :])


# The kernel. Rows: three tokens, two tokens; padding by slot, by length, by a slot that is not
# there, by a negative one; one token with an offset out of range, one with a length out of range.
ROWS = decode_region(
    slots=[2, 4, 0, 3, 9, -1, 6, 1],
    query_len=[3, 2, 3, 0, 3, 3, 1, 99],
    state_offset=[1, 0, 7, 1, 2, 0, 10**6, -3],
)
REAL = {0: 3, 1: 2, 6: 1, 7: 99}  # row -> its tokens, for the rows that are not padding


def kernel_case(shape, dtype, x_dtype, width, seed=0):
    """Tokens and pool; padding tokens and rows are NaN, and so is row 1, beside row 0."""
    rng = np.random.default_rng(seed)
    new = draw_tokens(rng, len(ROWS.slots), width, shape=shape)
    for row in range(len(ROWS.slots)):
        spoil(new, row, REAL.get(row, 0))
    spoil(new, 1)
    x, b, c = (jnp.asarray(y, x_dtype) for y in (new.x, new.b, new.c))
    pool = (LAYERS, 7, 4 if width <= 4 else 8, shape.heads, shape.head_dim, shape.state_dim)
    return new._replace(x=x, b=b, c=c), jnp.asarray(rng.normal(size=pool) * 0.3, dtype)


def check(new, states, run):
    """`run` is the reference: in outputs, in states written, and in all it must not write."""
    width, tolerance = new.x.shape[1], 8 * float(jnp.finfo(states.dtype).eps)
    before = np.asarray(states, np.float32)
    expected, after_reference = reference(new, states, 1, ROWS)
    out, after = (np.asarray(y, np.float32) for y in run(new, states, 1, ROWS))
    untouched = np.ones(before.shape[:3], bool)
    for row, count in REAL.items():
        count, slot = min(count, width), int(ROWS.slots[row])
        untouched[1, slot, :count] = False
        ours, theirs = after[1, slot, :count], np.asarray(after_reference[1, slot, :count])
        if row == 1:  # all its inputs are NaN
            assert np.isnan(ours).all() and np.isnan(out[row, :count]).all()
            continue
        np.testing.assert_allclose(out[row, :count], expected[row, :count], rtol=0, atol=5e-6)
        np.testing.assert_allclose(ours, theirs.astype(np.float32), rtol=tolerance, atol=2e-6)
    np.testing.assert_array_equal(after[untouched], before[untouched])
    padding = [row for row in range(len(out)) if row not in REAL]
    assert not np.any(out[padding])  # no uninitialised memory comes out


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
    interpreter, dtype, x_dtype, head_dim, state_dim, width
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(tokens, states, layer, rows):
        return mamba2_step_kernel(tokens, states, jnp.int32(layer), rows, interpret=interpreter)

    shape = Mamba2Shape(4, 2, head_dim, state_dim)
    check(*kernel_case(shape, dtype, x_dtype, width), run)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*MAMBA2.values(), Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, x_dtype, width):
    dispatch._chosen.pop("mamba2_step", None)
    check(*kernel_case(shape, dtype, x_dtype, width, seed=width), step)
    assert dispatch.implementations()["mamba2_step"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_float32_is_float32():
    rng, shape = np.random.default_rng(3), MAMBA2["nemotron-3-nano"]
    new = draw_tokens(rng, 2, 4, shape=shape)
    pool = (1, 3, 4, shape.heads, shape.head_dim, shape.state_dim)
    states = rng.normal(size=pool).astype(np.float32)
    rows = decode_region([2, 1], 4, state_offset=[3, 0])
    out, after = step(new, jnp.asarray(states), 0, rows)
    for row, (slot, offset) in enumerate(((2, 3), (1, 0))):
        expected, expected_after = oracle(states[0, slot, offset], *one_row(new, row))
        for ours, exact in ((out[row], expected), (after[0, slot], expected_after)):
            error = np.linalg.norm(np.asarray(ours, np.float64) - exact) / np.linalg.norm(exact)
            assert error < 1e-6
