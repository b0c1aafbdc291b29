"""Automaton: a regular grammar as tables, from which a device computes states and masks."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.checks import shown
from jaxspec.grammar import regex as regexes
from jaxspec.grammar.byte_dfa import ByteDfa
from jaxspec.text.parsers.output_parser import THINK_ENDS

MAX_STATES = 4096
MAX_CLASSES = 512
MAX_BUDGET = 2**17  # tokens of reasoning
_MAX_CELLS = 2**25  # of the columns of one depth, 64 MiB
_MOST_OF_ONE_TEXT = (
    64  # states with more allowed tokens are not searched for a text that must follow
)
_REFUSED, _EOS = 0, 1  # classes
_NUM_OWN = 2
_BLANKS = regexes.Repeat(regexes.Characters(((10, 10),)), 0, 4)  # as in `thinking.Thinking.rules`


class Masks(NamedTuple):
    """Masks of an automaton, which states share."""

    allowed: np.ndarray  # bool [masks, classes]
    of_state: np.ndarray  # [states]; index of the mask of each state


class Position(NamedTuple):
    """Position of an output in its automaton."""

    state: int  # -1 after a refused token
    left: int | None = None  # tokens of reasoning that the limit still allows; None means unlimited


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """States of a grammar over classes of tokens.

    A token t is allowed in state s if `next[s, classes[t]]` is not negative. State 0 is the
    start. The last state is the end, after an end-of-sequence token, and allows no token.

    A limit of the reasoning is a count beside the state: it decreases by one with each token from a
    state of the reasoning, and at 0 the state is replaced by one that allows `</think>` alone.
    """

    classes: np.ndarray  # int16 [vocab_size]
    next: np.ndarray  # int16 [states, classes], -1 where a token is refused
    limited: np.ndarray  # int16 [states]; in place of each state at the limit, or the state itself
    forced: np.ndarray  # int32 [states], longest token of the text that must follow, or -1

    @classmethod
    def without_forced(
        cls, classes: np.ndarray, following: np.ndarray, limited: np.ndarray
    ) -> "Automaton":
        return cls(classes, following, limited, np.full(len(following), -1, np.int32))

    def after(self, tokens: Iterable[int]) -> int:
        """Return the state after `tokens` from the start; -1 if one is refused."""
        return self.position(tokens).state

    def position(self, tokens: Iterable[int], budget: int | None = None) -> Position:
        """Return the position after `tokens` from the start, with at most `budget` of reasoning."""
        found = Position(int(self.limited[0]) if budget == 0 else 0, budget)
        for token in tokens:
            if found.state >= 0:
                found = self._after(found, token)
        return found

    def _after(self, position: Position, token: int) -> Position:
        state, left = position
        following = -1
        if 0 <= token < len(self.classes):
            following = int(self.next[state, self.classes[token]])
        if left is None or following < 0:
            return Position(following, left)
        left -= int(left > 0 and self.limited[state] != state)
        return Position(following if left else int(self.limited[following]), left)

    @functools.cached_property
    def masks(self) -> Masks:
        """The distinct masks of the states, as classes."""
        allowed, of_state = np.unique(self.next >= 0, axis=0, return_inverse=True)
        return Masks(allowed, of_state.ravel())

    def mask(self, state: int) -> np.ndarray:
        """Return the mask of the tokens that a state allows, int32 words, lowest bit first."""
        bits = np.zeros(-(-len(self.classes) // 32) * 32, bool)
        if state >= 0:
            bits[: len(self.classes)] = (self.next[state] >= 0)[self.classes]
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


class _Depth(NamedTuple):
    """Nodes of the vocabulary's trie at a depth, and the tokens that end there."""

    parents: np.ndarray  # int32 [nodes], of the depth above
    last_bytes: np.ndarray  # uint8 [nodes]
    tokens: np.ndarray  # int32 [ending]
    nodes: np.ndarray  # int32 [ending], of each of `tokens`


class _Columns(NamedTuple):
    """State after a token from each state of bytes, for groups of tokens where these agree."""

    rows: np.ndarray  # int16 [groups, states], `states` where refused
    groups: np.ndarray  # int32 [vocab_size], -1 if refused by all states


class AutomatonCompiler:
    """Compiles regexes for one vocabulary. Thread-safe."""

    def __init__(
        self, token_bytes: Sequence[bytes | None], eos_ids: Iterable[int], vocab_size: int
    ):
        """Build the trie of a vocabulary.

        Args:
            token_bytes: Bytes of each token of the tokenizer; None for special and added tokens.
            eos_ids: Ids that may follow a complete text. Their bytes are ignored.
            vocab_size: Number of token ids of the model, of which the last may have no token.

        Raises:
            ValueError: no end-of-sequence id is in the vocabulary.
        """
        if len(token_bytes) > vocab_size:
            raise ValueError(
                f"token_bytes must be of at most vocab_size={vocab_size:,} tokens, got "
                f"{len(token_bytes):,}. Use the model's own tokenizer."
            )
        self._vocab_size = vocab_size
        self._eos_ids = np.array(sorted({each for each in eos_ids if 0 <= each < vocab_size}), int)
        if not len(self._eos_ids):
            raise ValueError(
                f"eos_ids must have an id from 0 to {vocab_size - 1:,}, got {shown(eos_ids)}; an "
                "output could not end."
            )
        ends = set(self._eos_ids.tolist())
        texts = [b"" if i in ends else text or b"" for i, text in enumerate(token_bytes)]
        self._texts = texts + [b""] * (vocab_size - len(texts))
        self._depths = _trie(self._texts)

    def compile(
        self, regex: str, *, thinking_end: int | None = None, thinking_start: int | None = None
    ) -> Automaton:
        """Compile a regex in Rust's syntax that the whole output must match.

        Args:
            regex: The regex; `.` excludes newlines, and `\\w`, `\\d` and `\\s` are Unicode's.
            thinking_end: Id of the token `</think>`, after which the grammar begins, with up to
                four newlines. Before it is any text that does not spell the tag. None begins at
                once.
            thinking_start: Id of the token `<think>`, with which the output may begin; None if it
                begins in the reasoning.

        Raises:
            ValueError: the regex is invalid, has a part that no automaton has, allows no text of
                this vocabulary, exceeds the limits of states or classes, or may begin with a
                newline after reasoning that is optional.
        """
        node = regexes.parse(regex)
        if thinking_end is None:
            dfa = ByteDfa.of(node)
            columns, is_final, _ = _trimmed(self._columns(dfa), dfa.is_final, [0])
            return self._with_forced(self._automaton(columns, is_final))
        self._check_end(thinking_end)
        dfa = ByteDfa.of(regexes.Sequence((_BLANKS, node)))
        starts = [0] if thinking_start is None else [0, _after_blanks(dfa)]
        columns, is_final, starts = _trimmed(self._columns(dfa), dfa.is_final, starts)
        thoughts = _with_limit(self._columns(_texts_without(THINK_ENDS.encode())))
        num_thoughts = thoughts.rows.shape[1]
        is_final = np.concatenate([np.zeros(num_thoughts, bool), is_final])
        automaton = self._automaton(_side_by_side(thoughts, columns), is_final)
        automaton.limited[:num_thoughts] = num_thoughts - 1
        found = _entered_by(thinking_end, automaton, num_thoughts)
        if thinking_start is not None:
            found = _opened_by(thinking_start, found, num_thoughts + starts[1])
        return self._with_forced(found)

    def compile_limit(self, thinking_end: int, bytes_of: Callable[[int], bytes]) -> Automaton:
        """Compile reasoning that only a limit ends, or the output itself, then any text.

        Args:
            thinking_end: Id of the token `</think>`, which other tokens may spell, too.
            bytes_of: Bytes of each token id, also of special ones.

        Raises:
            ValueError: `thinking_end` is no id of a token.
        """
        self._check_end(thinking_end)
        dfa = _texts_until(THINK_ENDS.encode())
        rows, groups = self._columns(dfa)
        others = np.flatnonzero(groups < 0)
        own = np.zeros((len(others), len(dfa.next)), np.int16)
        for number, token in enumerate(others.tolist()):
            own[number] = [dfa.after(state, bytes_of(token)) for state in range(len(dfa.next))]
        groups[others] = len(rows) + np.arange(len(others))
        rows, groups = _merged(np.concatenate([rows, own]), groups)
        limit = len(dfa.next) - 1  # comes before the state after the tag
        table = np.where(rows == limit, limit + 1, rows).T
        table = np.insert(table, limit, -1, axis=0).astype(np.int16)
        limited = np.array([*[limit] * (limit + 1), limit + 1], np.int16)
        automaton = Automaton.without_forced(groups.astype(np.int16), table, limited)
        return self._with_forced(_entered_by(thinking_end, automaton, limit + 1))

    def _with_forced(self, automaton: Automaton) -> Automaton:
        """Add the longest token of the text that must follow each state, if any must."""
        order, (allowed, of_state) = np.argsort(automaton.classes, kind="stable"), automaton.masks
        sizes = np.bincount(automaton.classes, minlength=allowed.shape[1])
        members = np.split(order, np.cumsum(sizes)[:-1])
        found = np.full(len(allowed), -1, np.int32)
        for mask in np.flatnonzero(allowed @ sizes <= _MOST_OF_ONE_TEXT):
            tokens = [members[each] for each in np.flatnonzero(allowed[mask])]
            if tokens:
                found[mask] = self._forced(np.concatenate(tokens).tolist())
        return dataclasses.replace(automaton, forced=found[of_state])

    def _forced(self, tokens: list[int]) -> int:
        """Return the longest of the tokens that all others begin or continue; -1 if none is."""
        if len(tokens) == 1:
            return tokens[0]
        texts = sorted(
            ((self._texts[each], each) for each in tokens), key=lambda pair: len(pair[0])
        )
        longest = -1
        for number, (text, token) in enumerate(texts):
            if not text or not all(other.startswith(text) for other, _ in texts[number + 1 :]):
                break
            longest = token
        return longest

    def _check_end(self, thinking_end: int) -> None:
        if not 0 <= thinking_end < self._vocab_size or thinking_end in self._eos_ids:
            raise ValueError(
                f"thinking_end must be an id from 0 to {self._vocab_size - 1:,} that ends no "
                f"sequence, got {shown(thinking_end)}."
            )

    def _columns(self, dfa: ByteDfa) -> _Columns:
        """Walk the trie by depth, for all states at once, with equal columns merged."""
        num_states, num_classes = dfa.next.shape
        table = np.full((num_states + 1, num_classes), num_states, np.int16)
        table[:-1] = np.where(dfa.next < 0, num_states, dfa.next)
        columns = np.arange(num_states, dtype=np.int16)[None]
        node_columns = np.zeros(1, np.int32)
        groups, found, num_found = np.full(self._vocab_size, -1, np.int32), [columns[:0]], 0
        for depth in self._depths:
            if max(len(columns) * num_classes, num_found * num_states) > _MAX_CELLS:
                raise _too_many("classes of tokens", MAX_CLASSES)
            columns, node_columns = _next_columns(
                columns, node_columns[depth.parents], dfa.byte_classes[depth.last_bytes], table
            )
            used, ending = _used(node_columns[depth.nodes])
            groups[depth.tokens] = np.where(ending < 0, -1, ending + num_found)
            found.append(columns[used])
            num_found += len(used)
        return _merged(np.concatenate(found), groups)

    def _automaton(self, columns: _Columns, is_final: np.ndarray) -> Automaton:
        """Add the end, and the class of end-of-sequence tokens."""
        num_groups, num_states = columns.rows.shape
        if num_states + 1 > MAX_STATES:
            raise _too_many("states", MAX_STATES)
        # Two more classes remain for the start and the end of reasoning.
        if _NUM_OWN + num_groups + 2 > MAX_CLASSES:
            raise _too_many("classes of tokens", MAX_CLASSES)
        table = np.full((num_states + 1, _NUM_OWN + num_groups), -1, np.int16)
        table[:-1, _NUM_OWN:] = np.where(columns.rows < num_states, columns.rows, -1).T
        table[:-1, _EOS][is_final] = num_states
        classes = np.where(columns.groups < 0, _REFUSED, columns.groups + _NUM_OWN)
        classes[self._eos_ids] = _EOS
        limited = np.arange(len(table), dtype=np.int16)
        return Automaton.without_forced(classes.astype(np.int16), table, limited)


def _after_blanks(dfa: ByteDfa) -> int:
    """Return the state of an answer whose blanks, which may precede it, are over."""
    state = dfa.after(0, b"\n" * (_BLANKS.most or 0))
    if dfa.after(state, b"\n") >= 0:
        raise ValueError(
            "The regex of an automaton after optional reasoning must begin with no newline, got "
            "one that may. Begin it with another character."
        )
    return state


def _with_limit(thoughts: _Columns) -> _Columns:
    """Add a state that refuses all tokens, the last one."""
    size = thoughts.rows.shape[1]
    rows = np.where(thoughts.rows < size, thoughts.rows, size + 1).astype(np.int16)
    refused = np.full((len(rows), 1), size + 1, np.int16)
    return _Columns(np.hstack([rows, refused]), thoughts.groups)


def _texts_without(tag: bytes) -> ByteDfa:
    """Return the DFA of texts without `tag`; state i has its longest beginning of i bytes."""
    letters = sorted(set(tag))
    byte_classes = np.zeros(256, np.int32)
    byte_classes[letters] = np.arange(1, 1 + len(letters))
    table = np.zeros((len(tag), 1 + len(letters)), np.int32)
    for state, number in np.ndindex(len(tag), len(letters)):
        text = tag[:state] + bytes([letters[number]])
        longest = next(n for n in range(len(tag), -1, -1) if text.endswith(tag[:n]))
        table[state, 1 + number] = -1 if longest == len(tag) else longest
    return ByteDfa(byte_classes, table, np.ones(len(tag), bool))


def _texts_until(tag: bytes) -> ByteDfa:
    """Return the DFA of all texts; the last state is that after `tag`."""
    byte_classes, table, _ = _texts_without(tag)
    table = np.where(table < 0, len(tag), table)
    table = np.concatenate([table, np.full((1, table.shape[1]), len(tag), np.int32)])
    return ByteDfa(byte_classes, table, np.ones(len(table), bool))


def _side_by_side(first: _Columns, second: _Columns) -> _Columns:
    """Return the columns of the states of both, the first ones first."""
    sizes = first.rows.shape[1], second.rows.shape[1]
    parts = []
    for columns, size, start in zip((first, second), sizes, (0, sizes[0]), strict=True):
        rows = np.where(columns.rows < size, columns.rows + start, sum(sizes))
        refused = np.full((1, size), sum(sizes), rows.dtype)
        parts.append(np.concatenate([refused, rows]))
    pairs = (first.groups + 1).astype(np.int64) * len(parts[1]) + second.groups + 1
    found, inverse = np.unique(pairs, return_inverse=True)
    rows = np.hstack([parts[0][found // len(parts[1])], parts[1][found % len(parts[1])]])
    is_live = (rows < sum(sizes)).any(1)
    numbers = np.where(is_live, np.cumsum(is_live) - 1, -1).astype(np.int32)
    return _Columns(rows[is_live].astype(np.int16), numbers[inverse.ravel()])


def _entered_by(token: int, automaton: Automaton, first: int) -> Automaton:
    """Return an automaton in which `token` leads from the states before `first` to that state."""
    classes, column = automaton.classes.copy(), automaton.next[:, automaton.classes[token]].copy()
    column[:first] = first
    classes[token] = automaton.next.shape[1]
    table = np.concatenate([automaton.next, column[:, None]], axis=1)
    return Automaton.without_forced(classes, table, automaton.limited)


def _opened_by(token: int, automaton: Automaton, start: int) -> Automaton:
    """Return an automaton that begins as in state `start`, or with `token` in state 0."""
    classes, column = automaton.classes.copy(), automaton.next[:, automaton.classes[token]]
    classes[token] = automaton.next.shape[1]
    table = np.concatenate([automaton.next, column[:, None]], axis=1)
    table = np.concatenate([table[start : start + 1], table])
    table[table >= 0] += 1
    table[0, -1] = 1
    limited = np.concatenate([[0], automaton.limited + 1]).astype(np.int16)
    return Automaton.without_forced(classes, table, limited)


def _too_many(what: str, most: int) -> ValueError:
    return ValueError(
        f"The automaton of a regex must have at most {most:,} {what}, got more. Lower its counts "
        "of repetitions, or leave out alternatives."
    )


def _trie(texts: list[bytes]) -> list[_Depth]:
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    starts = np.cumsum(lengths) - lengths
    letters = np.frombuffer(b"".join(texts), np.uint8)
    nodes, depths = np.zeros(len(texts), np.int64), []
    tokens = np.flatnonzero(lengths)
    while len(tokens):
        keys = nodes[tokens] * 256 + letters[starts[tokens] + len(depths)]
        found, inverse = np.unique(keys, return_inverse=True)
        nodes[tokens] = inverse
        is_ending = lengths[tokens] == len(depths) + 1
        parents, last_bytes = (found // 256).astype(np.int32), (found % 256).astype(np.uint8)
        ending = tokens[is_ending].astype(np.int32)
        depths.append(_Depth(parents, last_bytes, ending, inverse[is_ending].astype(np.int32)))
        tokens = tokens[~is_ending]
    return depths


def _next_columns(
    columns: np.ndarray, parents: np.ndarray, byte_classes: np.ndarray, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns after one more byte, and that of each node, -1 if all states refuse."""
    num_states, num_classes = table.shape[0] - 1, table.shape[1]
    node_columns = np.full(len(parents), -1, np.int32)
    live = np.flatnonzero(parents >= 0)
    keys = parents[live] * num_classes + byte_classes[live]
    is_used = np.zeros(len(columns) * num_classes, bool)
    is_used[keys] = True
    pairs = np.flatnonzero(is_used)
    if len(pairs) * num_states > _MAX_CELLS:
        raise _too_many("classes of tokens", MAX_CLASSES)
    rows = table[columns[pairs // num_classes], (pairs % num_classes)[:, None]]
    numbers = np.full(len(is_used), -1, np.int32)
    is_live = (rows < num_states).any(1)
    numbers[pairs[is_live]] = np.arange(np.count_nonzero(is_live))
    merged = _merged(rows[is_live], numbers[keys])
    node_columns[live] = merged.groups
    return merged.rows, node_columns


def _merged(rows: np.ndarray, groups: np.ndarray) -> _Columns:
    """Merge equal rows; `groups` are their indices, or -1."""
    if not len(rows):
        return _Columns(rows, groups)
    weights = np.random.default_rng(1).integers(1, 2**63, rows.shape[1], np.uint64)
    hashes = np.concatenate([part.astype(np.uint64) @ weights for part in _parts(rows)])
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    if not (rows == rows[first[inverse]]).all():  # two hashes collided
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    numbers = np.append(inverse.ravel(), -1).astype(np.int32)
    return _Columns(rows[first], numbers[groups])


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    """Split rows, so that copies of 64 bits are small."""
    return np.array_split(rows, 1 + rows.size // 2**20)


def _used(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the groups that have a token, and the groups numbered by these."""
    used = np.unique(groups[groups >= 0])
    numbers = np.full(groups.max(initial=-1) + 2, -1, np.int32)
    numbers[used] = np.arange(len(used))
    return used, numbers[groups]


def _trimmed(
    columns: _Columns, is_final: np.ndarray, starts: Sequence[int]
) -> tuple[_Columns, np.ndarray, list[int]]:
    """Remove states that no tokens lead to, and those from which none lead to a final one.

    Returns:
        The columns, the final states, and the new indices of `starts`, of which 0 is the first.
    """
    rows, num_states = columns.rows, len(is_final)
    is_edge = np.zeros((num_states, num_states + 1), bool)
    for row in rows:
        is_edge[np.arange(num_states), row] = True
    is_edge = is_edge[:, :-1]
    is_start = np.isin(np.arange(num_states), starts)
    is_kept = _reached(is_edge, is_start) & _reached(is_edge.T, is_final)
    if not is_kept[list(starts)].all():
        raise ValueError(
            "The regex of an automaton must allow a text of the model's tokens, got one that "
            "allows none. Give another."
        )
    kept = np.flatnonzero(is_kept)
    numbers = np.full(num_states + 1, len(kept), np.int16)
    numbers[kept] = np.arange(len(kept))
    rows = numbers[rows[:, kept]]
    is_live = (rows < len(kept)).any(1)
    live = np.append(np.where(is_live, np.cumsum(is_live) - 1, -1), -1).astype(np.int32)
    found = _merged(rows[is_live], live[columns.groups])
    return found, is_final[kept], [int(numbers[start]) for start in starts]


def _reached(is_edge: np.ndarray, is_start: np.ndarray) -> np.ndarray:
    """Return the states that edges lead to from a set of states, which is included."""
    is_found, frontier = is_start.copy(), np.flatnonzero(is_start)
    while len(frontier):
        is_new = is_edge[frontier].any(0) & ~is_found
        is_found |= is_new
        frontier = np.flatnonzero(is_new)
    return is_found
