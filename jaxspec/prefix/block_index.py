"""BlockIndex: blocks by the keys of their pages and states, and by last use.

The key of a page, full or partly filled, is the digest of the text before it, including the salt
(`tree.digest_of`), and its own tokens:

    digest of 0..3 ── 4..7 ── page 2 of block 9      digest of 0..7 ── 8..11 ── page 0 of block 11
                 └─── 4, 5 ── state in block 10

A tree does not fit, because blocks are evicted whole, including pages that others follow. Pages
after a missing one cannot be used until it is cached again.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from jaxspec.plan.block_plan import Block, Key

_versions = itertools.count(1)


class BlockRef(NamedTuple):
    """Page or state found in a block; the block may have been evicted since."""

    tokens: tuple[int, ...]
    block: Block
    place: int = 0  # index of the page in the block


class BlockIndex:
    """The blocks of a tier: those in host memory, or those on disk."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[Block, int] = OrderedDict()  # their bytes, by last use
        self.num_bytes = 0
        self.version = next(_versions)  # changes with the index; unique among all indices
        self._refs: dict[tuple[Key, bool], BlockRef] = {}
        # By digest of the text before: number of states at each length of the next page.
        self._lengths: dict[bytes, Counter[int]] = {}

    def add(self, block: Block, num_bytes: int) -> None:
        """Add a block; its pages, or its state, replace those of older blocks with equal keys."""
        self.blocks[block], self.version = num_bytes, next(_versions)
        self.num_bytes += num_bytes
        for place, key in enumerate(block.keys):
            self._refs[key, block.is_state] = BlockRef(key.tokens, block, place)
            if block.is_state:
                self._lengths.setdefault(key.before, Counter())[len(key.tokens)] += 1

    def remove(self, block: Block) -> None:
        self.num_bytes -= self.blocks.pop(block)
        self.version = next(_versions)
        for key in block.keys:
            found = self.find(key, is_state=block.is_state)
            if found is not None and found.block is block:
                del self._refs[key, block.is_state]
            if block.is_state:
                self._lengths[key.before] -= Counter([len(key.tokens)])  # drops counts of 0
                if not self._lengths[key.before]:
                    del self._lengths[key.before]

    def touch(self, blocks: Iterable[Block]) -> None:
        """Mark those of the blocks that are in the index as used."""
        for block in blocks:
            if block in self.blocks:
                self.blocks.move_to_end(block)

    def find(self, key: Key, *, is_state: bool) -> BlockRef | None:
        """Return the full page of a key, or the cached state at its end."""
        return self._refs.get((key, is_state))

    def tail(self, before: bytes, rest: tuple[int, ...], page_size: int) -> BlockRef | None:
        """Return the state of the longest partly filled page that is a prefix of `rest`."""
        longest = min(len(rest), page_size - 1)
        for length in sorted(self._lengths.get(before, ()), reverse=True):
            key = Key(before, rest[:length])
            if length <= longest and (found := self.find(key, is_state=True)) is not None:
                return found
        return None
