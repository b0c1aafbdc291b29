"""What a proposer drafts is made harmless: ids outside the vocabulary, and numbers of drafts."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from random_automata import random_automaton

from jaxspec.plan.automaton_plan import Place, pack_automaton
from jaxspec.proposers import Drafts, Proposer
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.propose import DROPPED, allowed_drafts, propose
from jaxspec.sampling.automata import Automata

INPUTS = SimpleNamespace(slots=jnp.zeros(4, jnp.int32), num_drafts=2, features=GREEDY)
MODEL = SimpleNamespace(vocab_size=10)


class Given(Proposer):
    num_drafts = 2

    def __init__(self, tokens, counts):
        self.drafts = Drafts(jnp.array(tokens, jnp.int32), jnp.array(counts, jnp.int32), None)

    def propose(self, model, inputs, pools, tables):
        pools["mine"] = 3  # which nobody sees
        return self.drafts, {}


def test_an_id_is_in_the_vocabulary_or_a_placeholder_or_dropped():
    low, high = -(2**31), 2**31 - 1
    proposer = Given([[0, 9], [10, -1], [-2, 3], [low, high]], [2, 3, -1, 0])
    pools = {}
    drafts, after = jax.jit(lambda: propose(proposer, MODEL, INPUTS, pools, ()))()
    want = [[0, 9], [DROPPED, -1], [DROPPED, 3], [DROPPED, DROPPED]]
    np.testing.assert_array_equal(drafts.tokens, want)
    assert drafts.num_drafts.tolist() == [2, 2, 0, 0]
    assert DROPPED < -1 and pools == after == {}


def test_drawn_drafts_stay_as_they_were_drawn():
    """Refused ones, too: rejection sampling needs the distribution that they came from."""
    automaton = random_automaton(np.random.default_rng(0), 10, states=4, classes=3)
    pool = Automata.empty(10)
    for packed in pack_automaton(automaton, Place(1, 1, 1)):
        pool = pool.written(packed)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 10, (4, 2)), jnp.int32)
    inputs = SimpleNamespace(should_draft=jnp.ones(4, bool))
    states = jnp.arange(1, 5, dtype=jnp.int32)
    drawn = Drafts(tokens, jnp.full(4, 2, jnp.int32), jnp.zeros((4, 2, 10)))
    assert allowed_drafts(drawn, inputs, pool, states) is drawn
    given = dataclasses.replace(drawn, logits=None)
    found = allowed_drafts(given, inputs, pool, states)
    np.testing.assert_array_equal(found.tokens, pool.allowed_drafts(states, tokens))
    assert (found.tokens != tokens).any()
