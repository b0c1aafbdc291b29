"""Steps of both recurrences against float64, and their kernels against their references."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import GDN, KDA, MAMBA2, REPLAYED, at, both, every, spoil
from regions import decode_region

from benchmarks.measure.shapes import GdnShape, Mamba2Shape
from jaxspec.pallas import dispatch

LAYERS, SLOTS, CANDIDATES = 2, 5, 4


def pool_of(family):
    """The dimensions of a pool for small states."""
    return LAYERS, SLOTS, CANDIDATES, *family.state(family.small)


@every
def test_a_state_rolled_back_equals_a_state_never_advanced(family):
    rng, pool = np.random.default_rng(0), pool_of(family)
    states = jnp.zeros(pool)
    true = {slot: np.zeros(pool[3:]) for slot in (1, 3, 4)}
    offset = dict.fromkeys(true, 0)
    for _ in range(20):
        slots = rng.permutation(list(true))  # rows may change every step; slots stay
        query_len = rng.integers(0, CANDIDATES + 1, size=3)
        tokens = family.draw(rng, 3, CANDIDATES)
        region = decode_region(slots, query_len, state_offset=[offset[slot] for slot in slots])
        out, states = family.step.run(tokens, states, 1, region)
        for row, slot in enumerate(slots):
            if real := query_len[row]:
                expected, after = family.oracle(true[slot], *at(tokens, np.s_[row, :real]))
                np.testing.assert_allclose(out[row, :real], expected, atol=1e-5)
                offset[slot] = int(rng.integers(0, real))  # drafts accepted
                true[slot] = after[offset[slot]]
                np.testing.assert_allclose(states[1, slot, offset[slot]], true[slot], atol=1e-5)
    assert not np.any(states[0])


@every
def test_a_token_that_overflows_harms_no_token_before_it_nor_another_row(family):
    """In one of the operands that a state takes, or in all operands."""
    rng = np.random.default_rng(5)
    states = jnp.asarray(rng.normal(size=pool_of(family)), jnp.float32)
    tokens = family.draw(rng, 2, CANDIDATES)
    rows = decode_region([2, 3], CANDIDATES, state_offset=[0, 1])
    want, expected = family.step.run(tokens, states, 1, rows)
    error = 0.0 if family is MAMBA2 else 1e-6  # Gated DeltaNet solves for a row's tokens
    for fields in [*zip(family.written, strict=True), tokens._fields]:
        hurt = jax.tree.map(np.copy, tokens)
        spoil([getattr(hurt, field) for field in fields], (0, 2))
        out, after = family.step.run(hurt, states, 1, rows)
        harmless = (out[0, :2], want[0, :2]), (out[1], want[1])
        harmless += (after[1, 2, :2], expected[1, 2, :2]), (after[1, 3], expected[1, 3])
        for ours, theirs in harmless:
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=error)
        lost = np.isnan(after[1, 2, 2:])
        assert lost.all() if fields == tokens._fields else lost.any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize(
    ("family", "decay"), [(family, x) for family in REPLAYED for x in family.decays], ids=str
)
def test_a_strong_decay_keeps_what_follows_exact(family, decay):
    rng = np.random.default_rng(6)
    states = jnp.asarray(rng.normal(size=pool_of(family)), jnp.float32)
    tokens = family.draw(rng, 1, CANDIDATES)
    family.forget(tokens, (0, 1), decay)
    out, after = family.step.run(tokens, states, 1, decode_region([2], CANDIDATES))
    want, expected = family.oracle(np.asarray(states[1, 2, 0]), *at(tokens, 0))
    np.testing.assert_allclose(out[0], want, atol=1e-6)
    np.testing.assert_allclose(after[1, 2], expected, atol=1e-6)


@every
def test_padding_is_inert(family):
    rng = np.random.default_rng(1)
    states = rng.normal(size=pool_of(family)).astype(np.float32)
    tokens = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), family.draw(rng, 5, CANDIDATES))
    garbage = [10**6, -5, 2**31 - 1, -(2**31), 7]
    rows = decode_region([0, 0, 3, -2, 10**6], [4, 0, 0, 4, 4], state_offset=garbage)
    _, after = family.step.run(tokens, jnp.asarray(states), 1, rows)
    np.testing.assert_array_equal(after, states)


@every
def test_a_padding_token_is_never_stored(family):
    rng = np.random.default_rng(2)
    states = rng.normal(size=pool_of(family)).astype(np.float32)
    tokens, rows = family.draw(rng, 2, CANDIDATES), decode_region([2, 0], [2, 4])
    spoil(tokens, np.s_[0, 2:])  # row 0 has two tokens
    spoil(tokens, 1)  # row 1 is padding
    out, after = family.step.run(tokens, jnp.asarray(states), 1, rows)
    assert np.isfinite(after).all() and np.isfinite(out[0, :2]).all()
    np.testing.assert_array_equal(after[1, 2, 2:], states[1, 2, 2:])


@every
def test_more_tokens_than_candidates_are_refused(family):
    tokens = family.draw(np.random.default_rng(0), 1, CANDIDATES + 1)
    with pytest.raises(ValueError, match="num_drafts >= 4"):
        family.step.run(tokens, jnp.zeros(pool_of(family)), 0, decode_region([1], 1))


# The kernel. Rows: three tokens, two tokens; padding by slot, by length, by a slot that is not
# there, by a negative one; one token with an offset out of range, one with a length out of range.
ROWS = decode_region(
    slots=[2, 4, 0, 3, 9, -1, 6, 1],
    query_len=[3, 2, 3, 0, 3, 3, 1, 99],
    state_offset=[1, 0, 7, 1, 2, 0, 10**6, -3],
)
REAL = {0: 3, 1: 2, 6: 1, 7: 99}  # row -> its tokens, for the rows that are not padding


def check(family, run, shape, dtype, x_dtype, width, seed=0):
    """`run` is the reference: in outputs, in states written, and in all it must not write.

    Padding tokens and rows are NaN, and so is row 1, beside row 0.
    """
    rng = np.random.default_rng(seed)
    tokens = family.draw(rng, len(ROWS.slots), width, shape=shape)
    for row in range(len(ROWS.slots)):
        spoil(tokens, np.s_[row, REAL.get(row, 0) :])
    spoil(tokens, 1)
    tokens = family.in_dtype(tokens, x_dtype)
    pool = (LAYERS, 7, 4 if width <= 4 else 8, *family.state(shape))
    states = jnp.asarray(rng.normal(size=pool) * 0.3, dtype)

    error, tolerance = (5e-6 if family is MAMBA2 else 2e-6), 8 * float(jnp.finfo(dtype).eps)
    before = np.asarray(states, np.float32)
    expected, after_reference = family.step.reference(tokens, states, 1, ROWS)
    out, after = (np.asarray(x, np.float32) for x in run(tokens, states, 1, ROWS))
    untouched = np.ones(before.shape[:3], bool)
    for row, count in REAL.items():
        count, slot = min(count, width), int(ROWS.slots[row])
        untouched[1, slot, :count] = False
        ours, theirs = after[1, slot, :count], np.asarray(after_reference[1, slot, :count])
        if row == 1:  # all its inputs are NaN
            assert np.isnan(ours).all() and np.isnan(out[row, :count]).all()
            continue
        np.testing.assert_allclose(out[row, :count], expected[row, :count], rtol=0, atol=error)
        np.testing.assert_allclose(ours, theirs.astype(np.float32), rtol=tolerance, atol=2e-6)
    np.testing.assert_array_equal(after[untouched], before[untouched])
    padding = [row for row in range(len(out)) if row not in REAL]
    assert not np.any(out[padding])  # no uninitialised memory comes out


@pytest.mark.parametrize(
    ("family", "shape", "dtype", "x_dtype", "width"),
    [
        (GDN, GdnShape(2, 4, 128, 64), jnp.float32, jnp.float32, 3),
        (GDN, GdnShape(2, 4, 128, 128), jnp.float32, jnp.float32, 4),
        (GDN, GdnShape(2, 4, 128, 128), jnp.bfloat16, jnp.float32, 5),
        (GDN, GdnShape(2, 4, 64, 128), jnp.float32, jnp.float32, 1),
        (GDN, GdnShape(2, 4, 64, 64), jnp.float32, jnp.float32, 8),
        (GDN, GdnShape(2, 4, 128, 64), jnp.bfloat16, jnp.float32, 4),
        (GDN, GdnShape(2, 4, 64, 64), jnp.bfloat16, jnp.float32, 2),
        (GDN, GdnShape(2, 4, 128, 64), jnp.float16, jnp.float32, 3),
        (KDA, GdnShape(2, 2, 128, 128), jnp.float32, jnp.float32, 4),
        (KDA, GdnShape(2, 2, 64, 64), jnp.bfloat16, jnp.float32, 1),
        (MAMBA2, Mamba2Shape(4, 2, 64, 128), jnp.float32, jnp.float32, 3),
        (MAMBA2, Mamba2Shape(4, 2, 64, 64), jnp.float32, jnp.bfloat16, 8),
        (MAMBA2, Mamba2Shape(4, 2, 64, 128), jnp.bfloat16, jnp.bfloat16, 4),
        (MAMBA2, Mamba2Shape(4, 2, 128, 64), jnp.float16, jnp.float32, 1),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, family, shape, dtype, x_dtype, width
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(tokens, states, layer, rows):
        return family.step.kernel(tokens, states, jnp.int32(layer), rows, interpret=interpreter)

    check(family, run, shape, dtype, x_dtype, width)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("family", "shape", "x_dtype"),
    [
        *((GDN, shape, jnp.float32) for shape in (*GDN.published.values(), GdnShape(2, 2, 64, 64))),
        *itertools.product(
            [MAMBA2],
            [*MAMBA2.published.values(), Mamba2Shape(4, 2, 128, 64)],
            [jnp.float32, jnp.bfloat16],
        ),
    ],
    ids=str,
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(
    family, shape, dtype, x_dtype, width
):
    step = family.step
    dispatch._chosen.pop(step.name, None)
    check(family, step.run, shape, dtype, x_dtype, width, seed=width)
    assert dispatch.implementations()[step.name] == ("kernel",)


@pytest.mark.gpu
@both
def test_on_a_gpu_float32_is_float32(family):
    rng, shape = np.random.default_rng(3), family.typical
    tokens = family.draw(rng, 2, 4, shape=shape)
    states = rng.normal(size=(1, 3, 4, *family.state(shape))).astype(np.float32)
    rows = decode_region([2, 1], 4, state_offset=[3, 0])
    out, after = family.step.run(tokens, jnp.asarray(states), 0, rows)
    for row, (slot, offset) in enumerate(((2, 3), (1, 0))):
        expected, expected_after = family.oracle(states[0, slot, offset], *at(tokens, row))
        for ours, exact in ((out[row], expected), (after[0, slot], expected_after)):
            error = np.linalg.norm(np.asarray(ours, np.float64) - exact) / np.linalg.norm(exact)
            assert error < 1e-6
