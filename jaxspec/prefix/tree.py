"""PrefixTree: radix tree of the cached pages on the device, by their tokens.

A node is a page of tokens; its parent is the page before it. The path from a root spells a text,
and tokens are compared exactly, so there are no hash collisions. Each cache salt has its own root,
so requests with different salts share nothing.

    root ── 0..3 ── 4..7 ── 8..11        a request of tokens 0 to 13 and its full pages
              │       └──── 8, 9 *       a copy of half a page, with a cached state after token 9
              └──── 4, 5, 60, 61 *       another request, which diverged after token 5

A node may have a cached state: the recurrent state after its last token, in a state slot. A node
with less than a page of tokens (a tail) exists only for its cached state. It has no children, and
its page is never shared.

Pages that no request holds stay in the tree until their memory is needed. Then the least recently
used leaf is evicted first, so that every node keeps its path to the root.
"""

import dataclasses
import hashlib
import heapq
import itertools
from array import array
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Node:
    """Page of tokens; only `PrefixTree` modifies it."""

    parent: "Node | None"
    tokens: tuple[Any, ...]  # of the page; a root has its salt
    page: int
    depth: int  # number of pages up to its end
    children: "dict[tuple[int, ...], Node]" = dataclasses.field(default_factory=dict)  # full pages
    tails: "dict[tuple[int, ...], Node]" = dataclasses.field(default_factory=dict)  # partly filled
    checkpoint: int = 0  # slot of the cached state after its last token; 0 means none
    is_held: bool = True  # a request holds its page
    last_use: int = 0
    is_alive: bool = True
    digest: bytes | None = None  # see `digest_of`

    @property
    def is_leaf(self) -> bool:
        """True if the node has neither children nor tails."""
        return not (self.children or self.tails)


def digest_of(node: Node) -> bytes:
    """Return the 32-byte digest of the text up to the end of a node, including its salt.

    It is the same in every process, so it can name files.
    """
    path = []
    while node.digest is None and node.parent is not None:
        path.append(node)
        node = node.parent
    if node.digest is None:
        node.digest = hashlib.blake2b(repr(node.tokens[0]).encode(), digest_size=32).digest()
    digest = node.digest
    for each in reversed(path):
        digest = each.digest = chained(digest, each.tokens)
    return digest


def chained(digest: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a text extended by `tokens`."""
    return hashlib.blake2b(digest + array("i", tokens).tobytes(), digest_size=32).digest()


class PrefixMatch(NamedTuple):
    """Longest match of a text in the tree."""

    nodes: list[Node]  # full pages, in order, without the root
    at_checkpoint: Node | None  # the deepest node on the path, or tail of it, with a cached state

    def start(self, page_size: int, *, has_states: bool) -> tuple[int, Node | None]:
        """Return the prefix length at which a request can start, and the node that ends there.

        Return 0 and None if no cached prefix is usable.
        """
        node = self.at_checkpoint if has_states else next(reversed(self.nodes), None)
        if node is None or node.parent is None:
            return 0, None
        return (node.depth - 1) * page_size + len(node.tokens), node


class PrefixTree:
    """Nodes by salt and tokens; the `PagePool` counts their references and evicts from here."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._count = itertools.count(1)
        self._roots: dict[Hashable, Node] = {}
        self._by_page: dict[int, Node] = {}
        self.clear()

    def clear(self) -> list[int]:
        """Drop all nodes; return the pages that were in the tree."""
        for node in (*self._by_page.values(), *self._roots.values()):
            node.is_alive = False
        pages = list(self._by_page)
        self._roots, self._by_page = {}, {}
        self._leaves: list[tuple[int, int, Node]] = []  # heap by last use; entries may be stale
        self.num_evictable = 0
        self.version = next(self._count)  # changes whenever a match may change
        return pages

    def __len__(self) -> int:
        """Number of pages in the tree."""
        return len(self._by_page)

    def root(self, salt: Hashable) -> Node:
        """Return the root of a salt, created if it is missing."""
        if salt not in self._roots:
            self._roots[salt] = Node(None, (salt,), 0, 0)
        return self._roots[salt]

    def match(self, salt: Hashable, tokens: Sequence[int], limit: int) -> PrefixMatch:
        """Match the first `limit` of `tokens`."""
        node, nodes, best = self._roots.get(salt), list[Node](), None
        size, start = self.page_size, 0
        while node is not None:
            best = node if node.checkpoint else best
            rest = tuple(tokens[start : min(start + size, limit)])
            lengths = range(len(rest), 0, -1) if node.tails else ()
            best = next((node.tails[rest[:n]] for n in lengths if rest[:n] in node.tails), best)
            node = node.children.get(rest) if len(rest) == size else None
            if node is not None:
                nodes.append(node)
                start += size
        return PrefixMatch(nodes, best)

    def add(self, parent: Node, tokens: Sequence[int], page: int) -> Node:
        """Return the child of `parent` with these tokens; a new one gets `page`, which is held."""
        key = tuple(tokens)
        family = parent.children if len(key) == self.page_size else parent.tails
        if (known := family.get(key)) is not None:
            return known
        node = family[key] = self._by_page[page] = Node(parent, key, page, parent.depth + 1)
        node.last_use = self.version = next(self._count)
        return node

    def set_checkpoint(self, node: Node, slot: int) -> None:
        """Set the slot of the cached state of a node; 0 removes it."""
        node.checkpoint, self.version = slot, next(self._count)

    def touch(self, node: Node) -> None:
        """Mark a node as used."""
        node.last_use = next(self._count)
        self._offer(node)

    def remove(self, node: Node) -> list[Node]:
        """Remove a node and its descendants, and return them."""
        gone = [node]
        for each in gone:  # the list grows meanwhile
            gone += (*each.children.values(), *each.tails.values())
            each.is_alive = False
            self.num_evictable -= not each.is_held
            del self._by_page[each.page]
        parent = node.parent
        assert parent is not None
        family = parent.children if len(node.tokens) == self.page_size else parent.tails
        del family[node.tokens]
        self.version = next(self._count)
        self._offer(parent)
        if parent.parent is None:
            self.prune(parent.tokens[0])
        return gone

    def prune(self, salt: Hashable) -> None:
        """Drop the root of a salt if it has no pages."""
        if salt in self._roots and self._roots[salt].is_leaf:
            self._roots.pop(salt).is_alive = False

    # Called by the `PagePool`

    def holds(self, page: int) -> bool:
        return page in self._by_page

    def pin(self, page: int) -> None:
        self._by_page[page].is_held = True
        self.num_evictable -= 1

    def unpin(self, page: int) -> None:
        node = self._by_page[page]
        node.is_held, node.last_use = False, next(self._count)
        self.num_evictable += 1
        self._offer(node)

    def oldest(self) -> Node:
        """Return the node to evict: the least recently used leaf that no request holds.

        There must be a page that no request holds (`num_evictable`). If none of them is a leaf,
        return an inner node; its descendants leave the tree too, and requests keep the pages that
        they hold. This happens if a request holds a page in the tree, but a page of its own for the
        tokens before it.
        """
        while self._leaves:
            last_use, _, node = heapq.heappop(self._leaves)
            if self._may_go(node) and node.last_use == last_use:
                return node
        return next(node for node in reversed(self._by_page.values()) if not node.is_held)

    def _may_go(self, node: Node) -> bool:
        return node.is_alive and node.parent is not None and node.is_leaf and not node.is_held

    def _offer(self, node: Node) -> None:
        if self._may_go(node):
            heapq.heappush(self._leaves, (node.last_use, next(self._count), node))
        if len(self._leaves) > 64 + 4 * len(self._by_page):  # most entries are stale
            live = [each for each in self._by_page.values() if self._may_go(each)]
            self._leaves = [(each.last_use, next(self._count), each) for each in live]
            heapq.heapify(self._leaves)
