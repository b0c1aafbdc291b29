"""HostTier: blocks of pages and states evicted from the device, in host memory.

A block holds pages of any texts, in the order of their eviction, and has an index of its own beside
the tree of the device (`BlockIndex`). Blocks are evicted whole, least recently used first: to files
if a folder is given (`DiskTier`), else for good.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxspec.plan.block_plan import Block, Read
from jaxspec.prefix.block_index import BlockIndex, BlockRef, Key
from jaxspec.prefix.disk_tier import DiskTier
from jaxspec.prefix.tree import Node, PrefixMatch, chained, digest_of

MAX_SECONDS = 10.0  # longest wait for the disk while no step runs


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
        max_bytes: int,
        page_size: int,
        mover: BlockMover,
        disk: DiskTier | None = None,
        *,
        has_states: bool,
    ):
        """Start empty.

        `mover` measures blocks and copies them to the device. `has_states` is true if a request
        needs a cached state as well as pages.
        """
        self.max_bytes, self._page_size, self._has_states = max_bytes, page_size, has_states
        self.mover, self.disk = mover, disk
        self.num_read_pages = self.num_read_states = 0  # never reset
        self.num_evicted_pieces = self.num_hits = 0
        self.clear()

    def clear(self) -> None:
        """Drop all blocks in memory; files stay."""
        if self.disk is not None:
            self.disk.forget_unread()
        self.index = BlockIndex()
        self.num_bytes = 0

    def figures(self) -> dict[str, Any]:
        """Return the stats by name; hits are tokens restored to the device."""
        counts = {
            "num_hits": self.num_hits,
            "num_read_pages": self.num_read_pages,
            "num_read_states": self.num_read_states,
            "num_pieces": len(self.index),
            "num_bytes": self.num_bytes,
            "max_bytes": self.max_bytes,
            "num_evicted_pieces": self.num_evicted_pieces,
            "seconds": self.mover.seconds,
        }
        return counts | ({} if self.disk is None else {"disk": self.disk.figures()})

    # Evictions from the device

    def lacks_page(self, node: Node) -> bool:
        """Return whether no block has this page; a hit marks the block as used.

        False for a partial page, which is in the block of its state.
        """
        if len(node.tokens) < self._page_size:
            return False
        return self._lacks(self.index.page(_key(node)))

    def lacks_state(self, node: Node) -> bool:
        """Return whether no block has the node's state; a hit marks the block as used."""
        return self._lacks(self.index.state(_key(node)))

    def add_pages(self, nodes: Sequence[Node]) -> Read:
        """Add a block of the pages of these nodes; return the copy that fills it."""
        block = Block(is_state=False)
        self.num_read_pages += len(nodes)
        self._add(block, [_key(node) for node in nodes])
        return Read(block, tuple(node.page for node in nodes))

    def add_state(self, node: Node, slot: int) -> Read:
        """Add a block of the node's state in `slot`, and of its page if that is partly filled.

        Return the copy that fills it.
        """
        block = Block(is_state=True)
        self.num_read_states += 1
        self._add(block, [_key(node)])
        is_tail = len(node.tokens) < self._page_size
        return Read(block, (node.page,) if is_tail else (), slot)

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
        size, digest, depth, has_states = self._page_size, digest_of(root), 0, self._has_states
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
            elif (page := self._find(BlockIndex.page, key)) is not None:
                digest = chained(digest, rest)
                pages.append(page)
            else:
                break
            depth += 1
            if not has_states:
                found = depth, None
            elif (state := self._find(BlockIndex.state, key)) is not None:
                found = depth, state._replace(tokens=())
        num_matched = depth * size
        depth, state = found
        num_tokens = depth * size + (len(state.tokens) if state is not None else 0)
        if num_tokens <= match.start(size, has_states=has_states)[0]:
            return HostPrefixMatch(0, (), (), None, num_matched)
        nodes = match.nodes[:depth]
        return HostPrefixMatch(
            num_tokens, nodes, tuple(pages[: depth - len(nodes)]), state, num_matched
        )

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

    def is_loading(self, block: Block) -> bool:
        """Return whether a block is on disk only and must be read into memory first."""
        return self.disk is not None and self.disk.is_loading(block)

    def load(self, blocks: Iterable[Block]) -> bool:
        """Wait for the blocks on disk while no step runs; return False after a timeout."""
        return self.disk is None or self.disk.wait(blocks, MAX_SECONDS)

    def close(self) -> None:
        """Wait until evicted blocks are written to disk, and free the memory."""
        if self.disk is not None:
            self.disk.close()
        self.clear()

    # Helpers

    def _indices(self) -> list[BlockIndex]:
        return [self.index, *([] if self.disk is None else [self.disk.index])]

    def _find(
        self, look: Callable[[BlockIndex, Key], BlockRef | None], key: Key
    ) -> BlockRef | None:
        found = (look(index, key) for index in self._indices())
        return next((each for each in found if each is not None), None)

    def _tail(self, before: bytes, rest: tuple[int, ...]) -> BlockRef | None:
        tails = [index.tail(before, rest, self._page_size) for index in self._indices()]
        fitting = [each for each in tails if each is not None]
        return max(fitting, key=lambda found: len(found.tokens), default=None)

    def _lacks(self, found: BlockRef | None) -> bool:
        if found is not None:
            self.index.touch([found.block])
        return found is None

    def _add(self, block: Block, keys: Sequence[Key]) -> None:
        self.index.add(block, keys)
        self.num_bytes += self.mover.num_bytes(is_state=block.is_state)
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self.index))
            gone = self.index.forget(oldest)
            self.num_bytes -= self.mover.num_bytes(is_state=oldest.is_state)
            self.num_evicted_pieces += 1
            if self.disk is not None:
                self.disk.put(oldest, gone)


def _key(node: Node) -> Key:
    assert node.parent is not None
    return Key(digest_of(node.parent), node.tokens)
