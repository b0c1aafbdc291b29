"""HostTier: blocks of pages and states evicted from the device, in host memory.

A block holds pages of any texts, in the order of their eviction, and has an index of its own beside
the tree of the device (`BlockIndex`). Blocks are evicted whole, least recently used first: to files
if a folder is given (`DiskTier`), else for good.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxspec.plan.block_plan import Block, Key, Read
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.prefix.block_index import BlockIndex, BlockRef
from jaxspec.prefix.disk_tier import DiskTier
from jaxspec.prefix.tree import Node, PrefixMatch, chained, digest_of


class BlockMover(Protocol):
    """Copies blocks to the device before they are written into the pools (`runner.blocks`)."""

    seconds: float  # total time of copies to the device

    def num_bytes(self, *, is_state: bool) -> int:
        """Return the bytes of a block."""
        ...

    def stage(self, blocks: Iterable[Block]) -> None:
        """Start to copy these blocks to the device beside running steps; drop all others."""
        ...

    def has_landed(self, block: Block) -> bool:
        """Return True unless the block is staged and its copy is unfinished."""
        ...


class HostPrefixMatch(NamedTuple):
    """Longest usable prefix that device and host have together."""

    num_tokens: int  # length of the prefix; 0 means none
    nodes: Sequence[Node]  # full pages on the device, in order
    pages: tuple[BlockRef, ...]  # full pages after them, on the host
    state: BlockRef | None  # cached state at the end; None without states
    num_matched: int = 0  # tokens in full pages on device or host, with a state or not

    @property
    def blocks(self) -> list[Block]:
        """The blocks that must be copied to the device, each once."""
        found = [*([] if self.state is None else [self.state]), *self.pages]
        return list(dict.fromkeys(each.block for each in found))


class HostTier:
    """Blocks by last use, in at most `max_bytes` of host memory, and on `disk`."""

    def __init__(
        self,
        shapes: StepShapes,
        max_bytes: int,
        mover: BlockMover,
        disk: DiskTier | None = None,
    ):
        """Start empty; `mover` measures blocks and copies them to the device."""
        self.max_bytes, self._shapes = max_bytes, shapes
        self._has_states = shapes.num_checkpoints > 0  # a request needs one as well as pages
        self.mover, self.disk = mover, disk
        self.num_read_pages = self.num_read_states = 0  # never reset
        self.num_evicted_pieces = self.num_hits = 0
        self.clear()

    def clear(self) -> None:
        """Drop all blocks in memory; files stay."""
        if self.disk is not None:
            self.disk.forget_unfilled()
        self.index = BlockIndex()

    def stats(self) -> dict[str, Any]:
        """Return the stats by name; hits are tokens restored to the device."""
        counts = {
            "num_hits": self.num_hits,
            "num_read_pages": self.num_read_pages,
            "num_read_states": self.num_read_states,
            "num_pieces": len(self.index.blocks),
            "num_bytes": self.index.num_bytes,
            "max_bytes": self.max_bytes,
            "num_evicted_pieces": self.num_evicted_pieces,
            "seconds": self.mover.seconds,
        }
        return counts | ({} if self.disk is None else {"disk": self.disk.stats()})

    # Evictions from the device

    def save_pages(self, nodes: Sequence[Node]) -> list[Read]:
        """Add blocks of the pages that no block has; return the copies that fill them.

        A partly filled page is in the block of its state.
        """
        size, most = self._shapes.page_size, self._shapes.block_pages
        new = [node for node in nodes if len(node.tokens) == size and self._lacks(node)]
        self.num_read_pages += len(new)
        parts = [new[first : first + most] for first in range(0, len(new), most)]
        return [Read(self._add(part), tuple(node.page for node in part)) for part in parts]

    def save_state(self, node: Node) -> list[Read]:
        """Add a block of the node's state, with its page if that is partly filled.

        Return the copy that fills it, or none if a block has this state.
        """
        if not self._lacks(node, is_state=True):
            return []
        self.num_read_states += 1
        tail = (node.page,) if len(node.tokens) < self._shapes.page_size else ()
        return [Read(self._add([node], is_state=True), tail, node.checkpoint)]

    # Lookups

    def versions(self) -> tuple[int, ...]:
        """Return numbers that change whenever `find` may return something else.

        Polls the disk first.
        """
        if self.disk is not None:
            self.disk.poll()
        return tuple(index.version for index in self._indices())

    def find(
        self, match: PrefixMatch, root: Node, tokens: Sequence[int], limit: int
    ) -> HostPrefixMatch:
        """Return the longest prefix of `tokens[:limit]` from device and host together.

        `match` is the match of `tokens` on the device, below `root`. `num_tokens` of the result is
        0 if the match on the device alone is as long.
        """
        size, digest, depth = self._shapes.page_size, digest_of(root), 0
        has_states = self._has_states
        pages, found = list[BlockRef](), (0, None)
        while True:
            rest = tuple(tokens[depth * size : min((depth + 1) * size, limit)])
            if has_states and (tail := self._tail(digest, rest)) is not None:
                found = depth, tail
            if len(rest) < size:
                break
            key = Key(digest, rest)
            if depth < len(match.nodes):
                digest = digest_of(match.nodes[depth])
            elif (page := self._find(key, is_state=False)) is not None:
                digest = chained(digest, rest)
                pages.append(page)
            else:
                break
            depth += 1
            if not has_states:
                found = depth, None
            elif (state := self._find(key, is_state=True)) is not None:
                found = depth, state._replace(tokens=())
        num_matched = depth * size
        depth, state = found
        num_tokens = depth * size + (len(state.tokens) if state is not None else 0)
        if num_tokens <= match.start(size, has_states=has_states)[0]:
            return HostPrefixMatch(0, (), (), None, num_matched)
        nodes = match.nodes[:depth]
        pages = tuple(pages[: depth - len(nodes)])
        return HostPrefixMatch(num_tokens, nodes, pages, state, num_matched)

    def stage(self, blocks: Iterable[Block], ahead: Iterable[Block] = ()) -> None:
        """Start to copy these blocks to the device, and no others.

        `ahead` are blocks that are needed later. A block that requests share is copied once.
        """
        first = list(dict.fromkeys(blocks))
        wanted = list(dict.fromkeys((*first, *ahead)))
        self.index.touch(wanted)
        if self.disk is not None:
            self.disk.want(first, wanted)
        self.mover.stage(wanted)

    def close(self) -> None:
        """Wait until evicted blocks are written to disk, and free the memory."""
        if self.disk is not None:
            self.disk.close()
        self.clear()

    # Helpers

    def _indices(self) -> list[BlockIndex]:
        return [self.index, *([] if self.disk is None else [self.disk.index])]

    def _find(self, key: Key, *, is_state: bool) -> BlockRef | None:
        found = (index.find(key, is_state=is_state) for index in self._indices())
        return next(filter(None, found), None)

    def _tail(self, before: bytes, rest: tuple[int, ...]) -> BlockRef | None:
        tails = (index.tail(before, rest, self._shapes.page_size) for index in self._indices())
        return max(filter(None, tails), key=lambda found: len(found.tokens), default=None)

    def _lacks(self, node: Node, *, is_state: bool = False) -> bool:
        """Return whether no block has the node's page or state; a hit marks the block as used."""
        found = self.index.find(_key(node), is_state=is_state)
        if found is not None:
            self.index.touch([found.block])
        return found is None

    def _add(self, nodes: Sequence[Node], *, is_state: bool = False) -> Block:
        block = Block(is_state=is_state, keys=map(_key, nodes))
        self.index.add(block, self.mover.num_bytes(is_state=is_state))
        while self.index.num_bytes > self.max_bytes:
            oldest = next(iter(self.index.blocks))
            self.index.remove(oldest)
            self.num_evicted_pieces += 1
            if self.disk is not None:
                self.disk.put(oldest)
        return block


def _key(node: Node) -> Key:
    assert node.parent is not None
    return Key(digest_of(node.parent), node.tokens)
