"""Automata of regular grammars: their tables on the device, and the plans that write them.

A grammar whose language is regular needs no masks from the host: a row has the state of its
automaton, from which the device computes masks and later states itself. The states of all automata
are in one pool; a plan (`plan.AUTOMATON`) writes some of them before the step in which their first
request enters. Imports no JAX.
"""

import functools
from collections.abc import Iterator

import numpy as np

from jaxspec.grammar.automaton import MAX_CLASSES, Automaton
from jaxspec.layout import Field, PackedLayout

NUM_STATES = 2048
"""States of the pool. State 0 allows every token and stays."""
NUM_AUTOMATA = 32
"""Automata in the pool, with the one of state 0."""
STATES_PER_WRITE = 64


@functools.cache
def automaton_layout(vocab_size: int) -> PackedLayout:
    """Return the layout of a plan that writes states of an automaton; pairs of int16 are packed."""
    states = STATES_PER_WRITE, MAX_CLASSES // 2
    return PackedLayout(
        [
            Field("automaton", "Index of the automaton; 0 writes nothing."),
            Field("classes", "Class of each token.", shape=(-(-vocab_size // 2),)),
            Field("states", "Indices of the states, then 0.", shape=states[:1]),
            Field("next", "State after a token of each class; -1 refuses it.", shape=states),
        ]
    )


def pack_automaton(automaton: Automaton, index: int, base: int) -> Iterator[np.ndarray]:
    """Yield packed plans (int32) that write an automaton, with its first state at `base`."""
    layout = automaton_layout(len(automaton.classes))
    num_states, num_classes = automaton.next.shape
    moved = np.where(automaton.next < 0, -1, automaton.next + base)
    for start in range(0, num_states, STATES_PER_WRITE):
        part = moved[start : start + STATES_PER_WRITE]
        packed = np.zeros(layout.size, np.int32)
        fields = layout.unpack(packed)
        fields["automaton"][...] = index
        fields["classes"].view(np.int16)[: len(automaton.classes)] = automaton.classes
        fields["states"][: len(part)] = base + start + np.arange(len(part))
        next_states = fields["next"].view(np.int16)
        next_states[...] = -1
        next_states[: len(part), :num_classes] = part
        yield packed
