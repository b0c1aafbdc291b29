"""Automata on the device follow those of the host, wherever they are in the pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_automata import random_automaton

from jaxspec.plan.automaton_plan import (
    NUM_MASKS,
    NUM_STATES,
    PER_WRITE,
    Place,
    grammar_state,
    pack_automaton,
)
from jaxspec.sampling.automata import Automata
from jaxspec.sampling.bits import is_set

VOCAB = 75
write = jax.jit(Automata.written)


def written(pool, automaton, place):
    for packed in pack_automaton(automaton, place):
        pool = write(pool, packed)
    return pool


def check(pool, automaton, place):
    """All states and tokens of an automaton, against its tables."""
    num_states = len(automaton.next)
    states, tokens = map(np.ravel, np.mgrid[:num_states, :VOCAB].astype(np.int32))
    after = automaton.next[states, automaton.classes[tokens]]
    got = np.asarray(pool.after(jnp.asarray(states + place.state), jnp.asarray(tokens)))
    np.testing.assert_array_equal(got, np.where(after < 0, states, after) + place.state)
    each = np.arange(num_states, dtype=np.int32)
    allowed = is_set(pool.masks_of(jnp.asarray(each + place.state)), VOCAB)
    np.testing.assert_array_equal(allowed, (after >= 0).reshape(num_states, VOCAB))


@pytest.mark.soak
def test_each_automaton_of_the_pool_is_followed():
    random = np.random.default_rng(0)
    pool, found = Automata.empty(VOCAB), []
    state = mask = 1
    for index in range(1, 6):
        automaton, place = random_automaton(random, VOCAB), Place(index, state, mask)
        pool = written(pool, automaton, place)
        found.append((automaton, place))
        state, mask = state + len(automaton.next), mask + len(automaton.masks.allowed)
    for automaton, place in found:
        check(pool, automaton, place)
    later = random_automaton(random, VOCAB, states=len(found[2][0].next), classes=1)
    pool = written(pool, later, found[2][1])  # in the place of another
    check(pool, later, found[2][1])
    check(pool, *found[1])
    check(pool, *found[3])


@pytest.mark.parametrize("states", [PER_WRITE, PER_WRITE + 1])
def test_an_automaton_may_take_several_plans_and_the_last_place(states):
    automaton = random_automaton(np.random.default_rng(1), VOCAB, states=states, classes=12)
    place = Place(31, NUM_STATES - states, NUM_MASKS - len(automaton.masks.allowed))
    assert len(list(pack_automaton(automaton, place))) == -(-states // PER_WRITE)
    check(written(Automata.empty(VOCAB), automaton, place), automaton, place)


def test_state_0_allows_every_token_and_stays():
    automaton = random_automaton(np.random.default_rng(2), VOCAB)
    pool = written(Automata.empty(VOCAB), automaton, Place(1, 1, 1))
    (packed, *_) = pack_automaton(automaton, Place(1, 1, 1))
    pool = write(pool, np.zeros_like(packed))  # writes nothing
    check(pool, automaton, Place(1, 1, 1))
    zeros, tokens = jnp.zeros(VOCAB, jnp.int32), jnp.arange(VOCAB, dtype=jnp.int32)
    assert not pool.after(zeros, tokens).any() and is_set(pool.masks_of(zeros[:1]), VOCAB).all()


def test_the_count_of_a_limit_is_that_of_the_host():
    random = np.random.default_rng(5)
    place, counted = Place(1, 5, 1), 0
    for _ in range(4):
        automaton = random_automaton(random, VOCAB, states=7, classes=4)
        pool = written(Automata.empty(VOCAB), automaton, place)
        tokens = random.integers(0, VOCAB, (60, 6)).astype(np.int32)
        budgets = [None if number % 4 == 0 else number % 5 for number in range(60)]
        starts = [grammar_state(place, automaton.position((), budget)) for budget in budgets]
        along = np.asarray(pool.along(jnp.asarray(starts, jnp.int32), jnp.asarray(tokens)))
        allowed = np.asarray(is_set(pool.masks_of(jnp.asarray(along[:, 1])), VOCAB))
        for row, path in enumerate(tokens.tolist()):
            accepted = []
            for column, token in enumerate(path, 1):
                if automaton.position([*accepted, token], budgets[row]).state >= 0:
                    accepted.append(token)
                position = automaton.position(accepted, budgets[row])
                assert along[row, column] == grammar_state(place, position)
                counted += position.left == 0
                if column == 1:
                    following = automaton.next[position.state, automaton.classes]
                    np.testing.assert_array_equal(allowed[row], following >= 0)
    assert counted > 20


def test_states_along_tokens_stay_where_there_is_no_token():
    automaton = random_automaton(np.random.default_rng(3), VOCAB, states=6, classes=3)
    pool = written(Automata.empty(VOCAB), automaton, Place(1, 1, 1))
    tokens = jnp.asarray(np.random.default_rng(4).integers(-1, VOCAB, (40, 5)).astype(np.int32))
    along = np.asarray(pool.along(jnp.ones(40, jnp.int32), tokens))
    for row, path in zip(along, np.asarray(tokens), strict=True):
        state = 0
        assert row[0] == 1
        for place, token in enumerate(path, 1):
            after = state if token < 0 else automaton.next[state, automaton.classes[token]]
            state = state if after < 0 else after
            assert row[place] == 1 + state


def test_drafts_that_are_refused_become_forced_ones_or_none():
    random = np.random.default_rng(5)
    automaton = random_automaton(random, VOCAB, states=8, classes=4)
    pool = written(Automata.empty(VOCAB), automaton, Place(1, 1, 1))
    tokens = random.integers(-2, VOCAB, (60, 4)).astype(np.int32)
    starts = random.integers(-1, 8, 60).astype(np.int32)  # -1: a row without an automaton
    got = np.asarray(pool.allowed_drafts(jnp.asarray(starts + 1), jnp.asarray(tokens)))
    for drafts, state, found in zip(tokens, starts, got, strict=True):
        if state < 0:
            assert found.tolist() == drafts.tolist()
            continue
        for draft, token in zip(drafts, found, strict=True):
            is_allowed = draft >= 0 and automaton.next[state, automaton.classes[draft]] >= 0
            assert token == (draft if is_allowed else automaton.forced[state])
            after = automaton.next[state, automaton.classes[token]] if token >= 0 else -1
            state = state if after < 0 else after
