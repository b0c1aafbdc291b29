"""Automata of regular grammars: their tables on the device, and the plans that write them.

A grammar whose language is regular needs no masks from the host: a row has the state of its
automaton, from which the device computes masks and later states itself. The states of all automata
are in one pool, and so are their masks, which many states share; a plan (`plan.AUTOMATON`) writes
some of them before the step in which their first request enters. Imports no JAX.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxspec.grammar.automaton import MAX_CLASSES, Automaton, Position
from jaxspec.layout import Field, PackedLayout

STATE_BITS = 13
"""Lower bits of a row's `grammar_state`, with the state. Above them is the number of tokens that
the limit of the reasoning still allows, plus 1; 0 without a limit."""
NUM_STATES = 1 << STATE_BITS
"""States of the pool. State 0 allows every token and stays."""
NUM_MASKS = 2048
"""Masks of the pool. Mask 0 allows every token."""
NUM_AUTOMATA = 32
"""Automata in the pool, with the one of state 0."""
PER_WRITE = 256
"""States, and masks, that a plan writes."""


class Place(NamedTuple):
    """Place of an automaton in the pool."""

    index: int  # of the automaton
    state: int  # index of its first state
    mask: int  # index of its first mask


@functools.cache
def automaton_layout(vocab_size: int) -> PackedLayout:
    """Return the layout of a plan that writes states of an automaton; pairs of int16 are packed."""
    many = (PER_WRITE,)
    return PackedLayout(
        [
            Field("automaton", "Index of the automaton; 0 writes nothing."),
            Field("classes", "Class of each token.", shape=(-(-vocab_size // 2),)),
            Field("states", "Indices of the states, then 0.", shape=many),
            Field("state_masks", "Index of each state's mask.", shape=many),
            Field(
                "forced",
                "Longest token of the text that must follow each state, or -1.",
                shape=many,
            ),
            Field("next", "State after each class, or -1.", shape=(*many, MAX_CLASSES // 2)),
            Field("limited", "State in place of each state at the limit.", shape=many),
            Field("masks", "Indices of the masks, then 0.", shape=many),
            Field("allowed", "One bit per class.", shape=(*many, MAX_CLASSES // 32)),
        ]
    )


def grammar_state(place: Place, position: Position) -> int:
    """Return the `grammar_state` of a row at a position of the automaton at `place`."""
    count = 0 if position.left is None else position.left + 1
    return place.state + position.state + (count << STATE_BITS)


def pack_automaton(automaton: Automaton, place: Place) -> Iterator[np.ndarray]:
    """Yield the packed plans (int32) that write an automaton at `place`."""
    layout = automaton_layout(len(automaton.classes))
    allowed, state_masks = automaton.masks
    (num_states, num_classes), num_masks = automaton.next.shape, len(allowed)
    bits = np.zeros((num_masks, MAX_CLASSES), bool)
    bits[:, :num_classes] = allowed
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    for start in range(0, max(num_states, num_masks), PER_WRITE):
        packed = np.zeros(layout.size, np.int32)
        fields = layout.unpack(packed)
        fields["automaton"][...] = place.index
        fields["classes"].view(np.int16)[: len(automaton.classes)] = automaton.classes
        part = automaton.next[start : start + PER_WRITE]
        count = len(part)
        fields["states"][:count] = place.state + start + np.arange(count)
        fields["state_masks"][:count] = place.mask + state_masks[start : start + count]
        fields["forced"][:count] = automaton.forced[start : start + count]
        fields["limited"][:count] = place.state + automaton.limited[start : start + count]
        following = fields["next"].view(np.int16)
        following[...] = -1
        following[:count, :num_classes] = np.where(part < 0, -1, part + place.state)
        part = words[start : start + PER_WRITE]
        fields["masks"][: len(part)] = place.mask + start + np.arange(len(part))
        fields["allowed"][: len(part)] = part
        yield packed
