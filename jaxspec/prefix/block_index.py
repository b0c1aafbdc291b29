"""BlockIndex: blocks by the tokens of their pages and states.

An entry is a page, full or partly filled. Its key is the digest of the text before it, including
the salt (`tree.digest_of`), and its own tokens:

    digest of 0..3 ── 4..7 ── page 2 of block 9      digest of 0..7 ── 8..11 ── page 0 of block 11
                 └─── 4, 5 ── state in block 10

A tree does not fit, because blocks are evicted whole, including pages that others follow. Pages
after a missing one cannot be used until it is cached again.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxspec.plan.block_plan import Block

_versions = itertools.count(1)


class Key(NamedTuple):
    """Key of a page, and of the cached state at its end."""

    before: bytes  # digest of the text before the page
    tokens: tuple[int, ...]  # of the page; less than a full page only for a state


class BlockRef(NamedTuple):
    """Page or state found in a block; the block may have been evicted since."""

    tokens: tuple[int, ...]
    block: Block
    place: int = 0  # index of the page in the block


class _Entry:
    __slots__ = ("page", "state")

    def __init__(self) -> None:
        self.page: BlockRef | None = None
        self.state: BlockRef | None = None


class BlockIndex:
    """Entries by key; blocks by last use."""

    def __init__(self) -> None:
        self._below: dict[bytes, dict[tuple[int, ...], _Entry]] = {}
        self._keys: OrderedDict[Block, tuple[Key, ...]] = OrderedDict()
        # By digest of the text before: number of states at each length of the next page.
        self._lengths: dict[bytes, Counter[int]] = {}
        self.version = next(_versions)  # changes with the index; unique among all indices

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._keys)

    def __contains__(self, block: object) -> bool:
        return block in self._keys

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks, least recently used first."""
        return iter(self._keys)

    def add(self, block: Block, keys: Iterable[Key]) -> None:
        """Add a block with the pages of `keys`, in its order, or with one state.

        The state is that at the end of the only page in `keys`.
        """
        self._keys[block], self.version = tuple(keys), next(_versions)
        for place, key in enumerate(self._keys[block]):
            entry = self._below.setdefault(key.before, {}).setdefault(key.tokens, _Entry())
            found = BlockRef(key.tokens, block, place)
            if block.is_state:
                entry.state = found
                self._lengths.setdefault(key.before, Counter())[len(key.tokens)] += 1
            else:
                entry.page = found

    def forget(self, block: Block) -> tuple[Key, ...]:
        """Remove a block and return its keys."""
        keys, self.version = self._keys.pop(block), next(_versions)
        for before, tokens in keys:
            if block.is_state:
                self._uncount(before, len(tokens))
            family = self._below.get(before, {})
            entry = family.get(tokens)
            if entry is None:
                continue
            entry.page = None if entry.page and entry.page.block is block else entry.page
            entry.state = None if entry.state and entry.state.block is block else entry.state
            if entry.page is None and entry.state is None:
                del family[tokens]
            if not family:
                del self._below[before]
        return keys

    def touch(self, blocks: Iterable[Block]) -> None:
        """Mark those of the blocks that are in the index as used."""
        for block in blocks:
            if block in self._keys:
                self._keys.move_to_end(block)

    def page(self, key: Key) -> BlockRef | None:
        """Return the full page of a key."""
        entry = self._below.get(key.before, {}).get(key.tokens)
        return None if entry is None else entry.page

    def state(self, key: Key) -> BlockRef | None:
        """Return the cached state at the end of a full or partly filled page."""
        entry = self._below.get(key.before, {}).get(key.tokens)
        return None if entry is None else entry.state

    def tail(self, before: bytes, rest: tuple[int, ...], page_size: int) -> BlockRef | None:
        """Return the state of the longest partly filled page that is a prefix of `rest`."""
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
