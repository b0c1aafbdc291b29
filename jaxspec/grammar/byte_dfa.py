"""Deterministic automata over the bytes of UTF-8, built from the tree of a regex."""

import functools
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxspec.grammar.regex import Characters, Choice, Node, Ranges, Repeat, Sequence

MAX_BYTE_STATES = 4096
_MAX_NFA_STATES = 50_000
_MAX_WORK = 1_500_000  # visited edges, about a second

Edge: TypeAlias = tuple[int, int, int]
"""First byte, last byte, state after one of them."""

_END = 0  # the only accepting state of the NFA


class ByteDfa(NamedTuple):
    """Minimal DFA; state 0 is the start."""

    byte_classes: np.ndarray  # int32 [256], of bytes that no state distinguishes
    next: np.ndarray  # int32 [states, classes], -1 where a byte is refused
    is_final: np.ndarray  # bool [states]

    @staticmethod
    def of(node: Node) -> "ByteDfa":
        """Build the DFA of a regex.

        Raises:
            ValueError: it has too many states, or they take too long to find.
        """
        nfa = _Nfa()
        return _minimal(_Subsets(nfa, nfa.build(node, _END)).dfa())

    def after(self, state: int, text: bytes) -> int:
        """Return the state after a text; -1 if it is refused."""
        for byte in text:
            if state >= 0:
                state = int(self.next[state, self.byte_classes[byte]])
        return state


def _too_large(what: str, most: int) -> ValueError:
    return ValueError(
        f"The regex of an automaton must need at most {most:,} {what}, got one that needs more. "
        "Lower its counts of repetitions, or leave out alternatives."
    )


class _Nfa:
    """Thompson's NFA, built from its end, so that equal ends of characters are shared."""

    def __init__(self) -> None:
        self.edges: list[tuple[Edge, ...]] = [()]
        self.empty: list[tuple[int, ...]] = [()]
        self._num_parts = 0

    def _state(self, edges: tuple[Edge, ...] = (), empty: tuple[int, ...] = ()) -> int:
        if len(self.edges) >= _MAX_NFA_STATES:
            raise _too_large("states of an NFA", _MAX_NFA_STATES)
        self.edges.append(edges)
        self.empty.append(empty)
        return len(self.edges) - 1

    def build(self, node: Node, target: int) -> int:
        """Return the state from which the texts of `node` lead to `target`."""
        self._num_parts += 1
        if self._num_parts > _MAX_WORK // 10:
            raise _too_large("parts", _MAX_WORK // 10)
        if isinstance(node, Characters):
            return self._characters(node.ranges, target)
        if isinstance(node, Sequence):
            for part in reversed(node.parts):
                target = self.build(part, target)
            return target
        if isinstance(node, Choice):
            return self._state(empty=tuple(self.build(each, target) for each in node.options))
        return self._repeat(node, target)

    def _repeat(self, node: Repeat, target: int) -> int:
        start = target
        if node.most is None:
            start = self._state()
            self.empty[start] = self.build(node.part, start), target
        for _ in range((node.most or node.least) - node.least):
            start = self._state(empty=(self.build(node.part, start), target))
        for _ in range(node.least):
            start = self.build(node.part, start)
        return start

    def _characters(self, ranges: Ranges, target: int) -> int:
        states = list[int]()
        for edges in _utf8_graph(ranges):
            found = ((low, high, states[to] if to >= 0 else target) for low, high, to in edges)
            states.append(self._state(tuple(found)))
        return states[-1]


@functools.lru_cache(256)
def _utf8_graph(ranges: Ranges) -> tuple[tuple[Edge, ...], ...]:
    """Return the states that read one character; the last is the first read, -1 the end."""
    states, known = list[tuple[Edge, ...]](), dict[tuple[Edge, ...], int]()

    def state(sequences: list[tuple[tuple[int, int], ...]]) -> int:
        tails = dict[tuple[int, int], list[tuple[tuple[int, int], ...]]]()
        for first, *tail in sequences:
            tails.setdefault(first, []).append(tuple(tail))
        edges = tuple((*first, state(tail) if tail[0] else -1) for first, tail in tails.items())
        if edges not in known:
            known[edges] = len(states)
            states.append(edges)
        return known[edges]

    sequences = [each for low, high in ranges for each in _byte_ranges(low, high)]
    state(sequences)
    return tuple(states)


def _byte_ranges(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """Return code points as sequences of ranges of bytes: é to ÿ is (C3, C3), (A9, BF)."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            return _byte_ranges(low, last) + _byte_ranges(last + 1, high)
    for shift in range(6, 6 * len(chr(low).encode()), 6):
        mask = (1 << shift) - 1
        if low | mask != high | mask:
            if low & mask:
                return _byte_ranges(low, low | mask) + _byte_ranges((low | mask) + 1, high)
            if high & mask != mask:
                end = high & ~mask
                return _byte_ranges(low, end - 1) + _byte_ranges(end, high)
    return [tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))]


class _Subsets:
    """The subset construction, with limits of states and work."""

    def __init__(self, nfa: _Nfa, start: int):
        self._nfa, self._start, self._work = nfa, start, 0
        cuts = {0, 256}
        for edges in nfa.edges:
            for low, high, _ in edges:
                cuts.update((low, high + 1))
        sizes = np.diff(sorted(cuts))
        self._byte_classes = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        self._class_of = self._byte_classes.tolist()
        self._closures = dict[int, frozenset[int]]()
        self._by_targets = dict[frozenset[int], int]()
        self._by_closure = dict[frozenset[int], int]()
        self._states = list[frozenset[int]]()

    def dfa(self) -> ByteDfa:
        self._index(frozenset((self._start,)))
        rows = list[np.ndarray]()
        while len(rows) < len(self._states):
            rows.append(self._row(self._states[len(rows)]))
        is_final = np.array([_END in state for state in self._states])
        return ByteDfa(self._byte_classes, np.stack(rows), is_final)

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise _too_large("steps to build", _MAX_WORK)

    def _row(self, state: frozenset[int]) -> np.ndarray:
        targets, class_of = dict[int, set[int]](), self._class_of
        for each in state:
            for low, high, to in self._nfa.edges[each]:
                classes = range(class_of[low], class_of[high] + 1)
                self._spend(len(classes))
                for byte_class in classes:
                    targets.setdefault(byte_class, set()).add(to)
        row = np.full(class_of[-1] + 1, -1, np.int32)
        for byte_class, found in targets.items():
            row[byte_class] = self._index(frozenset(found))
        return row

    def _index(self, targets: frozenset[int]) -> int:
        """Return the DFA's state of NFA states, and of those that follow without a byte."""
        if targets not in self._by_targets:
            closure = frozenset[int]().union(*map(self._closure, targets))
            self._spend(len(closure))
            if closure not in self._by_closure:
                if len(self._states) >= MAX_BYTE_STATES:
                    raise _too_large("states of bytes", MAX_BYTE_STATES)
                self._by_closure[closure] = len(self._states)
                self._states.append(closure)
            self._by_targets[targets] = self._by_closure[closure]
        return self._by_targets[targets]

    def _closure(self, start: int) -> frozenset[int]:
        if start not in self._closures:
            seen, stack, found = {start}, [start], set[int]()
            while stack:
                state = stack.pop()
                if self._nfa.edges[state] or state == _END:
                    found.add(state)
                new = [each for each in self._nfa.empty[state] if each not in seen]
                seen.update(new)
                stack += new
            self._spend(len(seen))
            self._closures[start] = frozenset(found)
        return self._closures[start]


def _minimal(dfa: ByteDfa) -> ByteDfa:
    """Merge equal states: refine final and other states until successors agree (Moore)."""
    num_states, num_classes = dfa.next.shape
    weights = np.random.default_rng(0).integers(1, 2**63, num_classes + 1, np.uint64)
    labels, count = np.append(dfa.is_final, False).astype(np.uint64), 0
    labels[num_states] = 2  # of -1, the refusal
    while True:
        hashes = labels[dfa.next] @ weights[1:] + labels[:-1] * weights[0]
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        labels[:-1], labels[num_states] = inverse, len(first)
        if len(first) == count:
            break
        count = len(first)
    order = np.argsort(first)  # the start, found first, is 0 again
    numbers = np.append(np.argsort(order), -1).astype(np.int32)
    states = numbers[labels.astype(np.int64)]
    merged = states[dfa.next]
    representatives = first[order]
    found = ByteDfa(dfa.byte_classes, merged[representatives], dfa.is_final[representatives])
    is_exact = (found.next[states[:-1]] == merged).all()
    assert is_exact and (found.is_final[states[:-1]] == dfa.is_final).all()  # no hashes collided
    return found
