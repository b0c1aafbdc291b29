"""Random automata, which need not belong to any grammar."""

import numpy as np

from jaxspec.grammar.automaton import Automaton


def random_automaton(random, vocab, states=None, classes=None):
    states = states or int(random.integers(1, 9))
    classes = classes or int(random.integers(1, 6))
    following = random.integers(-1, states, (states, classes)).astype(np.int16)
    limited = np.where(random.random(states) < 0.5, np.arange(states), states - 1).astype(np.int16)
    of_token = random.integers(0, classes, vocab).astype(np.int16)
    forced = random.integers(-1, vocab, states).astype(np.int32)  # refused ones, too
    return Automaton(of_token, following, limited, forced)
