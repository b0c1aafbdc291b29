"""Steps of both recurrences that replay a ring, in XLA, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import GDN, KDA, MAMBA2, REPLAYED, at, every, spoil
from regions import decode_region
from replays import assert_rounding_does_not_add_up, kept_by, nan, pools, walk

from benchmarks.measure.shapes import GdnShape, Mamba2Shape
from jaxspec.pallas.recurrent.replay import next_ring_length

WIDTH = 4

any_acceptance = pytest.mark.parametrize("acceptance", ["none", "all", "random"])


def one_row(slot, num_computed, ring_length):
    return decode_region([slot], WIDTH, num_computed=num_computed, ring_length=ring_length)


@pytest.mark.few(1)
@any_acceptance
@every
def test_a_state_replayed_equals_a_state_never_advanced(family, acceptance):
    """Over many folds, with rows that change places and steps of fewer tokens.

    The pool begins full of NaN: nothing that was not written is read.
    """
    rng = np.random.default_rng(0)
    empty, kept_of = pools(family, nan, width=WIDTH, window=8), kept_by(acceptance, rng)
    states, _, folds = walk(
        family, family.replay.run, rng, empty, [WIDTH] * 300, kept_of, padded=True
    )
    assert folds > 60
    assert np.isnan(states[0]).all() and np.isnan(states[1, (0, 2), 0]).all()


@pytest.mark.few(4)
@pytest.mark.parametrize("narrow", [31, 32, 33, 35, 70, None])
@every
def test_steps_of_several_widths_share_a_ring(family, narrow):
    """A wide step after `narrow` ones of a token, as fill a window of 32. None: random widths."""
    rng = np.random.default_rng(narrow)
    widths = rng.integers(1, WIDTH + 1, 150) if narrow is None else [1] * narrow + [WIDTH, 1, WIDTH]
    empty, slowed = pools(family, nan, width=WIDTH), (0.1 if family is MAMBA2 else 0.05)
    run = family.replay.run
    _, _, folds = walk(family, run, rng, empty, widths, lambda real: real, slowed=slowed)
    assert folds >= 3


@pytest.mark.few(3)
@any_acceptance
@every
def test_replay_equals_snapshots(family, acceptance):
    rng = np.random.default_rng(2)
    kept_of = kept_by(acceptance, rng)
    states, ring = pools(family, np.zeros, width=WIDTH, window=8)
    snapshots = jnp.zeros((*states.shape[:2], WIDTH, *states.shape[3:]))
    like, computed, length, offset = family.draw(rng, 1), 0, 0, 0
    for _ in range(40):
        tokens = family.draw(rng, 1, WIDTH, like=like)
        rows = decode_region(
            [3], WIDTH, num_computed=computed, ring_length=length, state_offset=offset
        )
        out, states, ring = family.replay.run(tokens, states, ring, 0, rows)
        want, snapshots = family.step.run(tokens, snapshots, 0, rows)
        np.testing.assert_allclose(out, want, atol=1e-5)
        kept = kept_of(WIDTH)
        length = int(next_ring_length(length, kept, WIDTH, ring.window))
        computed, offset = computed + kept, kept - 1


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
@pytest.mark.parametrize(
    ("family", "shape", "slowed"),
    [
        (GDN, GdnShape(1, 1, key_dim=32, value_dim=16), 0.05),
        (KDA, GdnShape(1, 1, key_dim=32, value_dim=16), 0.05),
        (MAMBA2, Mamba2Shape(2, 1, head_dim=16, state_dim=32), 0.05),
    ],
    ids=str,
)
def test_rounding_does_not_add_up(family, shape, slowed, dtype, error):
    """4,000 tokens with random acceptance, of heads that remember hundreds."""
    rng = np.random.default_rng(1)
    states, ring = pools(family, np.zeros, shape, dtype, width=WIDTH)
    like, computed, length, outs, steps, kept = family.draw(rng, 1, shape=shape), 0, 0, [], [], []
    while computed < 4000:
        tokens = family.slowed(family.draw(rng, 1, WIDTH, shape=shape, like=like), slowed)
        rows = one_row(1, computed, length)
        out, states, ring = family.replay.run(tokens, states, ring, 0, rows)
        outs.append(out[0])
        steps.append(at(tokens, 0))
        kept.append(int(rng.integers(1, WIDTH + 1)))
        computed += kept[-1]
        length = int(next_ring_length(length, kept[-1], WIDTH, ring.window))
    assert_rounding_does_not_add_up(family, shape, outs, steps, kept, error)


@pytest.mark.parametrize(
    ("family", "decay"), [(family, x) for family in REPLAYED for x in family.decays], ids=str
)
def test_a_strong_decay_keeps_what_follows_exact(family, decay):
    rng = np.random.default_rng(6)
    states, ring = pools(family, np.zeros, width=WIDTH)
    exact, like = np.zeros(states.shape[3:]), family.draw(rng, 1)
    for length in (0, WIDTH, 2 * WIDTH):
        tokens = family.draw(rng, 1, WIDTH, like=like)
        family.forget(tokens, (0, 1), decay)
        rows = one_row(2, length, length)
        out, states, ring = family.replay.run(tokens, states, ring, 1, rows)
        expected, after = family.oracle(exact, *at(tokens, 0))
        np.testing.assert_allclose(out[0], expected, atol=2e-6)
        exact = after[-1]


@every
def test_padding_is_inert(family):
    """Slots, positions, lengths of padding may be anything; its tokens may be NaN."""
    rng = np.random.default_rng(1)
    before = pools(family, lambda dims: rng.normal(size=dims), width=WIDTH)
    tokens = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), family.draw(rng, 5, WIDTH))
    garbage = [10**6, -5, 2**31 - 1, -(2**31), 7]
    slots, query_len = [0, 0, 3, -2, 10**6], [4, 0, 0, 4, 4]
    rows = decode_region(slots, query_len, num_computed=garbage, ring_length=garbage[::-1])
    _, *after = family.replay.run(tokens, *before, 1, rows)
    jax.tree.map(np.testing.assert_array_equal, tuple(after), before)


@every
def test_a_token_that_overflows_harms_no_token_before_it_nor_another_row(family):
    """In one of the operands that a state takes, or in all operands."""
    rng = np.random.default_rng(5)
    before = pools(family, lambda dims: rng.normal(size=dims), width=WIDTH)
    tokens = family.draw(rng, 2, WIDTH)
    rows = decode_region([2, 3], WIDTH, num_computed=9, ring_length=[3, 5])
    want, _, expected = family.replay.run(tokens, *before, 1, rows)
    error = 0.0 if family is MAMBA2 else 1e-6  # Gated DeltaNet solves for a row's tokens
    for fields in [*zip(family.written, strict=True), tokens._fields]:
        hurt = jax.tree.map(np.copy, tokens)
        spoil([getattr(hurt, field) for field in fields], (0, 2))
        out, _, after = family.replay.run(hurt, *before, 1, rows)
        for ours, theirs in ((out[0, :2], want[0, :2]), (out[1], want[1])):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=error)
        for ours, theirs in zip(*map(jax.tree.leaves, (after, expected)), strict=True):
            np.testing.assert_array_equal(ours[1, 2, 9:11], theirs[1, 2, 9:11])
        lost = np.isnan(out[0, 2:])
        assert lost.all() if fields == tokens._fields else lost.any(axis=(1, 2)).all()


@every
def test_a_ring_too_small_for_its_steps_is_refused(family):
    tokens = family.draw(np.random.default_rng(0), 1, WIDTH)
    states, ring = pools(family, np.zeros, width=WIDTH - 1, window=8)
    with pytest.raises(ValueError, match="has 11 rows. Build it with at least 12"):
        family.replay.run(tokens, states, ring, 0, one_row(1, 1, 1))
    ring = dataclasses.replace(ring, window=WIDTH - 1)
    with pytest.raises(ValueError, match="a window of at least 4"):
        family.replay.run(tokens, states, ring, 0, one_row(1, 1, 1))
