"""PieceIndex: which piece has which page or state, by the text that leads there.

An entry is a page, whole or in part, and is found by the digest of the text before it, salt
included (`prefix_tree.digest_of`), and by its own tokens:

    digest of 0..3 ── 4..7 ── page 2 of piece 9      digest of 0..7 ── 8..11 ── page 0 of piece 11
                 └─── 4, 5 ── state in piece 10

A tree would not do: whole pieces are forgotten, whatever hangs on their pages. Pages behind a
missing one are of no use until it is there again.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxspec.piece_plan import Piece

_versions = itertools.count(1)


class Key(NamedTuple):
    """Where a page, or a state behind it, belongs."""

    before: bytes  # digest of the text before it
    tokens: tuple[int, ...]  # less than a page's, if a state follows on them


class Found(NamedTuple):
    """A page or state as it was when it was found: it may be forgotten meanwhile."""

    tokens: tuple[int, ...]
    piece: Piece
    place: int = 0  # of the page in the piece


class _Entry:
    __slots__ = ("page", "state")

    def __init__(self) -> None:
        self.page: Found | None = None
        self.state: Found | None = None


class PieceIndex:
    """Entries by key; pieces by their last use."""

    def __init__(self) -> None:
        """Start empty."""
        self._below: dict[bytes, dict[tuple[int, ...], _Entry]] = {}
        self._keys: OrderedDict[Piece, tuple[Key, ...]] = OrderedDict()
        # How many states stand behind so many tokens of the page that follows a text.
        self._lengths: dict[bytes, Counter[int]] = {}
        self.version = next(_versions)  # changes with the index; no two indices share a number

    def __len__(self) -> int:
        """Pieces."""
        return len(self._keys)

    def __contains__(self, piece: object) -> bool:
        """Whether a piece is here."""
        return piece in self._keys

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, those first that were used longest ago."""
        return iter(self._keys)

    def add(self, piece: Piece, keys: Iterable[Key]) -> None:
        """A piece has these pages, in its order; or the state behind the one that there is."""
        self._keys[piece], self.version = tuple(keys), next(_versions)
        for place, key in enumerate(self._keys[piece]):
            entry = self._below.setdefault(key.before, {}).setdefault(key.tokens, _Entry())
            found = Found(key.tokens, piece, place)
            if piece.is_state:
                entry.state = found
                self._lengths.setdefault(key.before, Counter())[len(key.tokens)] += 1
            else:
                entry.page = found

    def forget(self, piece: Piece) -> tuple[Key, ...]:
        """Drop a piece; what it had."""
        keys, self.version = self._keys.pop(piece), next(_versions)
        for before, tokens in keys:
            if piece.is_state:
                self._uncount(before, len(tokens))
            family = self._below.get(before, {})
            entry = family.get(tokens)
            if entry is None:
                continue
            entry.page = None if entry.page and entry.page.piece is piece else entry.page
            entry.state = None if entry.state and entry.state.piece is piece else entry.state
            if entry.page is None and entry.state is None:
                del family[tokens]
            if not family:
                del self._below[before]
        return keys

    def touch(self, pieces: Iterable[Piece]) -> None:
        """Pieces are of use, if they are here."""
        for piece in pieces:
            if piece in self._keys:
                self._keys.move_to_end(piece)

    def page(self, key: Key) -> Found | None:
        """The whole page of a key."""
        entry = self._below.get(key.before, {}).get(key.tokens)
        return None if entry is None else entry.page

    def state(self, key: Key) -> Found | None:
        """The state behind a page, or behind a part of one."""
        entry = self._below.get(key.before, {}).get(key.tokens)
        return None if entry is None else entry.state

    def tail(self, before: bytes, rest: tuple[int, ...], page_size: int) -> Found | None:
        """The state behind the longest part of a page that `rest` begins with."""
        longest = min(len(rest), page_size - 1)
        for length in sorted(self._lengths.get(before, ()), reverse=True):
            if length <= longest and (found := self.state(Key(before, rest[:length]))) is not None:
                return found
        return None

    def _uncount(self, before: bytes, length: int) -> None:
        lengths = self._lengths[before]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._lengths[before]
