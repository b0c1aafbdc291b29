"""gdn_replay against the recurrence in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import SMALL, operands, oracle
from gdn_replays import empty_pools, walk
from regions import decode_region

from benchmarks.measure.shapes import GdnShape
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.replay import gdn_replay
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import next_ring_length

WIDTH = 4

replay = jax.jit(gdn_replay, static_argnums=3)


def one_row(slot, num_computed, ring_length, query_len=WIDTH):
    """A region of a single row."""
    return decode_region([slot], query_len, num_computed=num_computed, ring_length=ring_length)


@pytest.mark.parametrize("acceptance", ["none", "all", "random"])
def test_a_state_replayed_equals_a_state_never_advanced(acceptance):
    """Over many folds, with rows that change places and steps of fewer tokens; outputs and state.

    The pool begins full of NaN: nothing that was not written is read.
    """
    rng = np.random.default_rng(0)
    kept_of = {
        "none": lambda real: 1,
        "all": lambda real: real,
        "random": lambda real: int(rng.integers(1, real + 1)),
    }[acceptance]
    pools = empty_pools(SMALL, width=WIDTH, window=8, fill=np.nan)
    states, _, folds = walk(replay, rng, pools, [WIDTH] * 40, kept_of, shape=SMALL, padded=True)
    assert folds > 10
    assert np.isnan(states[0]).all() and np.isnan(states[1, (0, 2), 0]).all()


@pytest.mark.parametrize("narrow", [31, 32, 33, 35, 70, None])
def test_steps_of_several_widths_share_a_ring(narrow):
    """A wide step after so many narrow ones, as fill a window of 32; None: widths at random."""
    rng = np.random.default_rng(narrow)
    widths = rng.integers(1, WIDTH + 1, 150) if narrow is None else [1] * narrow + [WIDTH, 1, WIDTH]
    pools = empty_pools(SMALL, width=WIDTH, fill=np.nan)
    _, _, folds = walk(replay, rng, pools, widths, lambda real: real, shape=SMALL, decay=0.05)
    assert folds >= 3


@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_rounding_does_not_add_up(dtype, error):
    """4,000 tokens with random acceptance: relative error against float64, in every quarter."""
    rng, shape = np.random.default_rng(1), GdnShape(1, 1, key_dim=32, value_dim=16)
    states, ring = empty_pools(shape, dtype, width=WIDTH)
    num_computed, length = 0, 0
    exact, wrong, right = np.zeros((1, 16, 32)), [], []
    while num_computed < 4000:
        q, k, v, g, beta = operands(rng, WIDTH, shape=shape)
        tokens = [x[None] for x in (q, k, v, 0.05 * g, beta)]
        rows = one_row(1, num_computed, length)
        out, states, ring = replay(GdnTokens(*tokens), states, ring, 0, rows)
        expected, after = oracle(exact, *(x[0] for x in tokens))
        wrong.append(np.linalg.norm(out[0] - expected))
        right.append(np.linalg.norm(expected))
        kept = int(rng.integers(1, WIDTH + 1))
        exact, num_computed = after[kept - 1], num_computed + kept
        length = int(next_ring_length(length, kept, WIDTH, ring.window))
    quarters = [np.sqrt(np.mean(np.square(x))) for x in np.array_split(wrong, 4)]
    typical = np.sqrt(np.mean(np.square(right)))
    assert max(quarters) < error * typical
    assert quarters[-1] < 1.5 * quarters[0]


def test_a_strong_decay_keeps_what_follows_exact():
    rng = np.random.default_rng(6)
    states, ring = empty_pools(SMALL, width=WIDTH)
    exact, length = np.zeros(states.shape[3:]), 0
    for step in range(3):
        tokens = operands(rng, 1, WIDTH)
        tokens[3][0, 1] = (-300.0, -1e5, -np.inf)[step]
        rows = one_row(2, length, length)
        out, states, ring = replay(GdnTokens(*tokens), states, ring, 1, rows)
        expected, after = oracle(exact, *(x[0] for x in tokens))
        np.testing.assert_allclose(out[0], expected, atol=1e-6)
        exact, length = after[-1], length + WIDTH


def random_pools(rng):
    """Checkpoints and ring of random numbers."""
    pools = empty_pools(SMALL, width=WIDTH)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), pools)


def test_padding_is_inert():
    """Slots, positions, lengths of padding may be anything; its tokens may be NaN."""
    rng = np.random.default_rng(1)
    pools = random_pools(rng)
    tokens = GdnTokens(*(jnp.full_like(x, jnp.nan) for x in operands(rng, 5, WIDTH)))
    garbage = [10**6, -5, 2**31 - 1, -(2**31), 7]
    slots, query_len = [0, 0, 3, -2, 10**6], [4, 0, 0, 4, 4]
    rows = decode_region(slots, query_len, num_computed=garbage, ring_length=garbage[::-1])
    _, *after = replay(tokens, *pools, 1, rows)
    jax.tree.map(np.testing.assert_array_equal, tuple(after), pools)


def test_a_token_that_overflows_harms_no_token_before_it_nor_another_row():
    rng = np.random.default_rng(5)
    pools = random_pools(rng)
    tokens = operands(rng, 2, WIDTH)
    rows = decode_region([2, 3], WIDTH, num_computed=9, ring_length=[3, 5])
    want, _, expected = replay(GdnTokens(*tokens), *pools, 1, rows)
    for x in tokens[1:]:
        hurt = [y.copy() for y in tokens]
        hurt[[y is x for y in tokens].index(True)][0, 2] = np.nan
        out, _, after = replay(GdnTokens(*hurt), *pools, 1, rows)
        np.testing.assert_allclose(out[0, :2], want[0, :2], atol=1e-6)
        np.testing.assert_allclose(out[1], want[1], atol=1e-6)
        np.testing.assert_array_equal(after.u[1, 2, 9:11], expected.u[1, 2, 9:11])
        assert np.isnan(out[0, 2:]).any(axis=(1, 2)).all()


def test_a_ring_too_small_for_its_steps_is_refused():
    tokens = GdnTokens(*operands(np.random.default_rng(0), 1, WIDTH))
    states, ring = empty_pools(SMALL, width=WIDTH - 1, window=8)
    with pytest.raises(ValueError, match="has 11 rows. Build it with at least 12"):
        gdn_replay(tokens, states, ring, 0, one_row(1, 1, 1))
    ring = dataclasses.replace(ring, window=WIDTH - 1)
    with pytest.raises(ValueError, match="a window of at least 4"):
        gdn_replay(tokens, states, ring, 0, one_row(1, 1, 1))


def test_a_norm_of_other_tokens_is_refused():
    """A kernel would read what lies behind its gates."""
    tokens = GdnTokens(*operands(np.random.default_rng(0), 1, WIDTH))
    features = SMALL.value_heads * 5
    norm = GatedNorm(jnp.zeros((WIDTH - 1, features)), jnp.zeros(5), first=0, eps=1e-6)
    with pytest.raises(ValueError, match=f"gates of {WIDTH} tokens, but these are of {WIDTH - 1}"):
        gdn_replay(tokens, *empty_pools(SMALL, width=WIDTH), 0, one_row(1, 1, 1), norm)
