"""PrefixTree: which pages hold the keys and values of which tokens, for requests to come.

A node is a page and the tokens in it, below the node of the page before it. So the way from a root
spells a text, and is compared token by token: no hash can collide. A root belongs to a salt, and no
way leads from one root to another.

    root ── 0..3 ── 4..7 ── 8..11        a request of tokens 0 to 13 and its pages
              │       └──── 8, 9 *       a copy of half a page, with a checkpoint behind token 9
              └──── 4, 5, 60, 61 *       another request parted after token 5

A node may have a checkpoint: the recurrent state after its last token lies in that slot of the
checkpoints' pool. A node with less than a page of tokens is there for its checkpoint alone. It has
no children, and nobody shares its page.

The tree keeps pages that nobody holds until they are needed. Then those go first that were used
longest ago, and among them leaves, so that no node loses its way to the root.
"""

import hashlib
import heapq
import itertools
from array import array
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple


class Node:
    """A page of tokens. `PrefixTree` alone changes it."""

    __slots__ = (
        "checkpoint",
        "children",
        "depth",
        "digest",
        "is_alive",
        "is_held",
        "last_use",
        "page",
        "parent",
        "tails",
        "tokens",
    )

    def __init__(self, parent: "Node | None", tokens: tuple[Any, ...], page: int):
        """Be a child of `parent`, which the tree tells of it; a root has its salt for tokens."""
        self.parent, self.tokens, self.page = parent, tokens, page
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages up to its end
        self.children: dict[tuple[int, ...], Node] = {}  # whole pages, by their tokens
        self.tails: dict[tuple[int, ...], Node] = {}  # less than a page
        self.checkpoint = 0  # slot of the state after its last token; 0: none
        self.is_held = True  # a request has its page
        self.last_use = 0
        self.is_alive = True
        self.digest: bytes | None = None  # see `digest_of`

    @property
    def is_leaf(self) -> bool:
        """Whether nothing hangs on it."""
        return not (self.children or self.tails)


def digest_of(node: Node) -> bytes:
    """What tells a node's text from every other one, its salt included; 32 bytes.

    It is the same in every process, so that files may be named by it.
    """
    way = []
    while node.digest is None and node.parent is not None:
        way.append(node)
        node = node.parent
    if node.digest is None:
        node.digest = hashlib.blake2b(repr(node.tokens[0]).encode(), digest_size=32).digest()
    digest = node.digest
    for each in reversed(way):
        digest = each.digest = chained(digest, each.tokens)
    return digest


def chained(digest: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a text with some tokens more."""
    return hashlib.blake2b(digest + array("i", tokens).tobytes(), digest_size=32).digest()


class Match(NamedTuple):
    """How far the tree knows a text."""

    nodes: list[Node]  # whole pages from the root on
    at_checkpoint: Node | None  # the deepest node on the way, or beside it, with a checkpoint

    def start(self, page_size: int, *, has_states: bool) -> tuple[int, Node | None]:
        """Where a request may begin: behind how many tokens, and behind which node.

        0 and None: nothing that is there is of use.
        """
        node = self.at_checkpoint if has_states else next(reversed(self.nodes), None)
        if node is None or node.parent is None:
            return 0, None
        return (node.depth - 1) * page_size + len(node.tokens), node


class PrefixTree:
    """Nodes by salt and tokens; pages are held by counting (`PagePool`), which asks it for more."""

    def __init__(self, page_size: int):
        """Start without nodes."""
        self.page_size = page_size
        self._count = itertools.count(1)
        self.clear()

    def clear(self) -> list[int]:
        """Forget every node; the pages that were in the tree."""
        nodes = list(getattr(self, "_by_page", {}).values())
        for node in (*nodes, *getattr(self, "_roots", {}).values()):
            node.is_alive = False
        pages = list(getattr(self, "_by_page", {}))
        self._roots: dict[Hashable, Node] = {}
        self._by_page: dict[int, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # a heap; entries may be out of date
        self.num_evictable = 0
        self.version = next(self._count)  # another one whenever a match may come out otherwise
        return pages

    def __len__(self) -> int:
        """Pages in it."""
        return len(self._by_page)

    def root(self, salt: Hashable) -> Node:
        """Where the texts of this salt begin."""
        if salt not in self._roots:
            self._roots[salt] = Node(None, (salt,), 0)
        return self._roots[salt]

    def match(self, salt: Hashable, tokens: Sequence[int], limit: int) -> Match:
        """How far the tree knows `tokens`, of which at most `limit` count."""
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
        return Match(nodes, best)

    def add(self, parent: Node, tokens: Sequence[int], page: int) -> Node:
        """The child of `parent` with these tokens; a new one has `page`, which somebody holds."""
        key = tuple(tokens)
        family = parent.children if len(key) == self.page_size else parent.tails
        if (known := family.get(key)) is not None:
            return known
        node = family[key] = self._by_page[page] = Node(parent, key, page)
        node.last_use = self.version = next(self._count)
        return node

    def set_checkpoint(self, node: Node, slot: int) -> None:
        """The state behind a node lies in a slot; 0: it does no more."""
        node.checkpoint, self.version = slot, next(self._count)

    def touch(self, node: Node) -> None:
        """A node is of use."""
        node.last_use = next(self._count)
        self._offer(node)

    def remove(self, node: Node) -> list[Node]:
        """Take out a node and all that hangs on it."""
        gone = [node]
        for each in gone:  # which grows meanwhile
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
        """Forget a salt that has no texts."""
        if salt in self._roots and self._roots[salt].is_leaf:
            self._roots.pop(salt).is_alive = False

    # What the pool of pages asks for.

    def holds(self, page: int) -> bool:
        """Whether the page is in the tree."""
        return page in self._by_page

    def pin(self, page: int) -> None:
        """Somebody holds a page of the tree that nobody held."""
        self._by_page[page].is_held = True
        self.num_evictable -= 1

    def unpin(self, page: int) -> None:
        """Nobody holds the page any more."""
        node = self._by_page[page]
        node.is_held, node.last_use = False, next(self._count)
        self.num_evictable += 1
        self._offer(node)

    def oldest(self) -> Node:
        """The node that goes first: the leaf that was used longest ago.

        There must be one that nobody holds (`num_evictable`). A request may hold a page behind one
        that nobody holds, if it has that page's tokens in another. Should there be no leaf, such a
        node goes with all behind it, and the request keeps its page.
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
        if len(self._leaves) > 64 + 4 * len(self._by_page):  # most are out of date
            live = [each for each in self._by_page.values() if self._may_go(each)]
            self._leaves = [(each.last_use, next(self._count), each) for each in live]
            heapq.heapify(self._leaves)
