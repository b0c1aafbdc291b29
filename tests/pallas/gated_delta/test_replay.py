"""gdn_replay against the recurrence in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import SMALL, int32, operands, oracle

from benchmarks.measure.shapes import GdnShape
from jaxspec.pallas.gated_delta.replay import GdnRing, gdn_replay
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import next_ring_length, ring_rows

LAYERS, SLOTS, WIDTH = 2, 5, 4

replay = jax.jit(gdn_replay, static_argnums=7)


def empty(shape=SMALL, dtype=jnp.float32, width=WIDTH, rows=None, fill=0.0):
    """Checkpoints and ring, every element `fill`."""
    rows = rows or ring_rows(width, jnp.dtype(dtype).itemsize)
    states = (LAYERS, SLOTS, 1, shape.value_heads, shape.value_dim, shape.key_dim)
    lead = (LAYERS, SLOTS, rows)
    return jnp.full(states, fill, dtype), GdnRing(
        k=jnp.full((*lead, shape.key_heads, shape.key_dim), fill, dtype),
        u=jnp.full((*lead, shape.value_heads, shape.value_dim), fill, dtype),
        g=jnp.full((*lead, shape.value_heads), fill, jnp.float32),
    )


@pytest.mark.parametrize("acceptance", ["none", "all", "random"])
def test_a_state_replayed_equals_a_state_never_advanced(acceptance):
    """Over many folds, with rows that change places and steps of fewer tokens; outputs and state.

    The pool begins full of NaN: nothing that was not written is read.
    """
    rng = np.random.default_rng(0)
    states, ring = empty(rows=12, fill=np.nan)
    slots = (1, 3, 4)
    states = states.at[1, slots, 0].set(0.0)
    true = {slot: np.zeros(states.shape[3:]) for slot in slots}
    computed, length = dict.fromkeys(slots, 5), dict.fromkeys(slots, 0)
    folds = 0
    for _ in range(40):
        rows = rng.permutation(slots)
        query_len = rng.integers(0, WIDTH + 1, size=3)
        tokens = operands(rng, 3, WIDTH)
        for x in tokens:
            for row, real in enumerate(query_len):
                x[row, real:] = np.nan
        index = (int32(*(facts[r] for r in rows)) for facts in (computed, length))
        out, states, ring = replay(
            *tokens, states, ring, 1, int32(*rows), *index, int32(*query_len)
        )
        for row, slot in enumerate(rows):
            if not (real := query_len[row]):
                continue
            expected, after = oracle(true[slot], *(x[row, :real] for x in tokens))
            np.testing.assert_allclose(out[row, :real], expected, atol=1e-5)
            kept = {"none": 1, "all": real, "random": int(rng.integers(1, real + 1))}[acceptance]
            new = int(next_ring_length(length[slot], kept, WIDTH, 12))
            folds += new < length[slot] + kept
            true[slot], computed[slot], length[slot] = after[kept - 1], computed[slot] + kept, new
    assert folds > 10
    assert np.isnan(states[0]).all() and np.isnan(states[1, (0, 2), 0]).all()


@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_rounding_does_not_add_up(dtype, error):
    """4,000 tokens with random acceptance: relative error against float64, in every quarter."""
    rng, shape = np.random.default_rng(1), GdnShape(1, 1, key_dim=32, value_dim=16)
    states, ring = empty(shape, dtype)
    states = jnp.zeros_like(states)
    rows, num_computed, length = ring.k.shape[2], 0, 0
    exact, wrong, right = np.zeros((1, 16, 32)), [], []
    while num_computed < 4000:
        q, k, v, g, beta = operands(rng, WIDTH, shape=shape)
        tokens = [x[None] for x in (q, k, v, 0.05 * g, beta)]
        index = int32(1), int32(num_computed), int32(length), int32(WIDTH)
        out, states, ring = replay(*tokens, states, ring, 0, *index)
        expected, after = oracle(exact, *(x[0] for x in tokens))
        wrong.append(np.linalg.norm(out[0] - expected))
        right.append(np.linalg.norm(expected))
        kept = int(rng.integers(1, WIDTH + 1))
        exact, num_computed = after[kept - 1], num_computed + kept
        length = int(next_ring_length(length, kept, WIDTH, rows))
    quarters = [np.sqrt(np.mean(np.square(x))) for x in np.array_split(wrong, 4)]
    typical = np.sqrt(np.mean(np.square(right)))
    assert max(quarters) < error * typical
    assert quarters[-1] < 1.5 * quarters[0]


def test_a_strong_decay_keeps_what_follows_exact():
    rng = np.random.default_rng(6)
    states, ring = empty()
    exact, length = np.zeros(states.shape[3:]), 0
    for step in range(3):
        tokens = operands(rng, 1, WIDTH)
        tokens[3][0, 1] = (-300.0, -1e5, -np.inf)[step]
        index = int32(2), int32(length), int32(length), int32(WIDTH)
        out, states, ring = replay(*tokens, states, ring, 1, *index)
        expected, after = oracle(exact, *(x[0] for x in tokens))
        np.testing.assert_allclose(out[0], expected, atol=1e-6)
        exact, length = after[-1], length + WIDTH


def test_padding_is_inert():
    """Slots, positions, lengths of padding may be anything; its tokens may be NaN."""
    rng = np.random.default_rng(1)
    pools = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), empty())
    tokens = [jnp.full_like(x, jnp.nan) for x in operands(rng, 5, WIDTH)]
    garbage = int32(10**6, -5, 2**31 - 1, -(2**31), 7)
    slots, query_len = int32(0, 0, 3, -2, 10**6), int32(4, 0, 0, 4, 4)
    _, *after = replay(*tokens, *pools, 1, slots, garbage, garbage[::-1], query_len)
    jax.tree.map(np.testing.assert_array_equal, tuple(after), pools)


def test_a_token_that_overflows_harms_no_token_before_it_nor_another_row():
    rng = np.random.default_rng(5)
    pools = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), empty())
    tokens = operands(rng, 2, WIDTH)
    index = int32(2, 3), int32(9, 9), int32(3, 5), int32(WIDTH, WIDTH)
    want, _, expected = replay(*tokens, *pools, 1, *index)
    for x in tokens[1:]:
        hurt = [y.copy() for y in tokens]
        hurt[[y is x for y in tokens].index(True)][0, 2] = np.nan
        out, _, after = replay(*hurt, *pools, 1, *index)
        np.testing.assert_allclose(out[0, :2], want[0, :2], atol=1e-6)
        np.testing.assert_allclose(out[1], want[1], atol=1e-6)
        np.testing.assert_array_equal(after.u[1, 2, 9:11], expected.u[1, 2, 9:11])
        assert np.isnan(out[0, 2:]).any(axis=(1, 2)).all()


def test_a_ring_too_small_for_its_steps_is_refused():
    tokens = operands(np.random.default_rng(0), 1, WIDTH)
    with pytest.raises(ValueError, match="ring_rows >= 8"):
        gdn_replay(*tokens, *empty(rows=7), 0, *[int32(1)] * 4)


def test_a_norm_of_other_tokens_is_refused():
    """A kernel would read what lies behind its gates."""
    tokens, features = operands(np.random.default_rng(0), 1, WIDTH), SMALL.value_heads * 5
    norm = GatedNorm(jnp.zeros((WIDTH - 1, features)), jnp.zeros(5), first=0, eps=1e-6)
    with pytest.raises(ValueError, match=f"gates of {WIDTH} tokens, but these are of {WIDTH - 1}"):
        gdn_replay(*tokens, *empty(), 0, *[int32(1)] * 4, norm)
