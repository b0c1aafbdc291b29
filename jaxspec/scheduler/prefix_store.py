"""PrefixStore: the pages and states that are kept, and what the next plan has to copy for them.

What the books say holds from the next plan on, for its copies run before its step. So a state may
be named here, and found by a request, before the device has copied it. The copies run in the order
in which they came here. So a page or slot may be given away as soon as a copy of it is planned.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.config import StepShapes
from jaxspec.piece_plan import Read, Write
from jaxspec.plan import Export, Fork
from jaxspec.request import Request
from jaxspec.scheduler.checkpoint_slots import CheckpointSlots
from jaxspec.scheduler.host_tier import HostTier
from jaxspec.scheduler.page_pool import PagePool
from jaxspec.scheduler.prefix_figures import PrefixFigures
from jaxspec.scheduler.prefix_tree import Node, PrefixTree

Copy = Export | Read | Write | Fork
"""A state is kept, a piece is filled or put back, or a request enters on a prefix."""


class _Pending(NamedTuple):
    """A request that lost its row before it was known how many of its tokens stand."""

    node: Node  # its last page in the tree
    pages: list[int]  # those behind it
    slot: int  # of its state


class PrefixStore:
    """The `Reserve` of its `pool`, from which nothing is taken but pages that nobody holds."""

    def __init__(self, shapes: StepShapes, figures: PrefixFigures, tier: HostTier | None = None):
        """Start empty, and count in `figures`; `tier` gets what has to go, if there is one."""
        self.tree = PrefixTree(shapes.page_size)
        self.pool = PagePool(shapes.num_pages, self)
        self._shapes, self._figures, self._tier = shapes, figures, tier
        # A copy of many pages takes as long as one of few. A pool of few pages keeps most of them.
        many = min(shapes.piece_pages, max(1, shapes.num_pages // 8))
        self._num_at_once = 1 if tier is None else many
        self._forget()

    def clear(self) -> None:
        """Forget everything; pages that requests hold stay theirs."""
        for request in list(self._pending):
            self.drop(request)
        self.pool.add_free(self.tree.clear())
        self._forget()

    def _forget(self) -> None:
        self.slots = CheckpointSlots(self._shapes.num_checkpoints, self.tree)
        self._pending: dict[Request, _Pending] = {}
        self.copies: list[Copy] = []  # for the next plan
        self._is_late = False

    def __len__(self) -> int:
        """Pages that are kept."""
        return len(self.tree)

    # Requests that run.

    def touch(self, node: Node) -> None:
        """A request begins behind a node, which is of use therefore."""
        self.tree.touch(node)
        self.slots.touch(node)

    def touch_before(self, request: Request, node: Node, length: int) -> None:
        """A checkpoint behind so many tokens of a request is of use, if it is on the way to `node`.

        The request began behind `node`, but others will part from it there.
        """
        depth = length // self._shapes.page_size
        if depth <= node.depth:
            while node.parent is not None and node.depth > depth:
                node = node.parent
            self.has(node, self._tail(request, length))

    def begin_late(self) -> None:
        """From here on the plan can keep nothing more: a request begins in it."""
        self._is_late = True

    def take_copies(self) -> list[Copy]:
        """What the plan that is made now has to copy before its step, in this order."""
        copies, self.copies, self._is_late = self.copies, [], False
        return copies

    def publish(self, request: Request, node: Node, num_computed: int) -> Node:
        """Put the full pages of so many tokens behind `node`, where the tree lacks their like.

        Returns the node of the last one.
        """
        count = num_computed // self._shapes.page_size
        if count <= node.depth and node.is_alive:
            return node
        if not node.is_alive:  # somebody's page, which was given up: its own take its place
            node = self.tree.root(request.cache_salt)
        return self._add(request, node, count, request.pages[node.depth :])

    def keep(self, request: Request, node: Node, length: int, *, gives_page: bool = False) -> None:
        """Make a checkpoint of a row behind `length` tokens; `node` is their last full page.

        A partly filled page is copied, or with `gives_page` taken over from a request that leaves.
        """
        tail = self._tail(request, length)
        if length < 1 or node.depth != length // self._shapes.page_size or self.has(node, tail):
            return
        slot = self._slot(request)
        if not slot:
            return
        page = request.pages[node.depth] if tail else 0
        source = target = 0
        if tail and not gives_page:
            if not self.pool.num_free:
                self._skip("no page", slot)
                return
            source, (target,) = page, self.pool.allocate(1)
        self.put(node, tail, target or page, slot)
        self.pool.release([target] if target else [])
        self.copies.append(Export(request.row, slot, source, target))

    # Requests that lost their row while steps were in flight.

    def keep_unsettled(self, request: Request, node: Node) -> None:
        """Keep what a row has when all that is in flight has run, wherever it then stands."""
        if slot := self._slot(request):
            pages = request.pages[node.depth :]
            self.pool.share(pages)
            self._pending[request] = _Pending(node, pages, slot)
            self.copies.append(Export(request.row, slot))

    def settle(self, request: Request) -> None:
        """All that was in flight has come, so it is known where the row stood at the end.

        Nothing, if nothing of the request waits for that.
        """
        if request not in self._pending:
            return
        node, pages, slot = self._pending.pop(request)
        length, first = len(request.tokens) - 1, node.depth
        if first == 0:
            node = self.tree.root(request.cache_salt)
        if node.is_alive:
            node = self._add(request, node, length // self._shapes.page_size, pages)
        tail = self._tail(request, length)
        if node.is_alive and self.has(node, tail):
            self.slots.give_back(slot)
        else:
            self.put(node, tail, pages[node.depth - first] if tail else 0, slot)
        self.pool.release(pages)

    def drop(self, request: Request) -> None:
        """What a request has lost is not kept."""
        if request in self._pending:
            pending = self._pending.pop(request)
            self._skip("dropped", pending.slot)
            self.pool.release(pending.pages)

    # As a `Reserve`.

    @property
    def num_evictable(self) -> int:
        """Pages that are there for nobody who runs."""
        pending = sum(len(each.pages) for each in self._pending.values())
        return self.tree.num_evictable + pending

    def holds(self, page: int) -> bool:
        """Whether the page is in the tree."""
        return self.tree.holds(page)

    def pin(self, page: int) -> None:
        """A request enters on it."""
        self.tree.pin(page)

    def unpin(self, page: int) -> None:
        """The last request that held it has left."""
        self.tree.unpin(page)

    def evict(self) -> list[int]:
        """Give up the page that was used longest ago and has none behind it, or a piece of them."""
        if not self.tree.num_evictable:
            self.drop(next(iter(self._pending)))
            return []  # they are free already
        gone = list[Node]()
        while self.tree.num_evictable and len(gone) < self._num_at_once:
            gone += self.tree.remove(self.tree.oldest())
        self._to_host(gone)
        self._figures.num_evicted_checkpoints += sum([self.slots.drop(node) for node in gone])
        self._figures.num_evicted_pages += len(gone)
        return [node.page for node in gone]

    # How.

    def _tail(self, request: Request, length: int) -> list[int]:
        """The tokens behind the last full page of so many."""
        return request.tokens[length - length % self._shapes.page_size : length]

    def _add(self, request: Request, node: Node, count: int, pages: list[int]) -> Node:
        """Add `pages` behind a node, until there are `count` from the root on."""
        size, first = self._shapes.page_size, node.depth
        for index in range(first, count):
            tokens = request.tokens[index * size : (index + 1) * size]
            node = self.tree.add(node, tokens, pages[index - first])
        return node

    def _to_host(self, gone: Sequence[Node]) -> None:
        """Have read what the host lacks of nodes that leave the tree."""
        if self._tier is None:
            return
        pages = [node for node in gone if self._tier.lacks_page(node)]
        size = self._shapes.piece_pages
        for first in range(0, len(pages), size):
            self.copies.append(self._tier.add_pages(pages[first : first + size]))
        for node in gone:
            if node.checkpoint:
                self._state_to_host(node, node.checkpoint)

    def _state_to_host(self, node: Node, slot: int) -> None:
        if self._tier is not None and self._tier.lacks_state(node):
            self.copies.append(self._tier.add_state(node, slot))

    def has(self, node: Node, tail: Sequence[int]) -> bool:
        """Whether there is such a checkpoint, which is of use then."""
        there = node.tails.get(tuple(tail)) if tail else node
        if there is None or not there.checkpoint:
            return False
        self.touch(there)
        return True

    def put(self, node: Node, tail: Sequence[int], page: int, slot: int) -> None:
        """Name a slot as what lies behind a node and the `tail`, which has a held page of its own.

        Not if the node has left the tree for that page, or for the slot.
        """
        if not node.is_alive:
            self._skip("no page", slot)
            return
        self.slots.put(self.tree.add(node, tail, page) if tail else node, slot)
        self._figures.num_checkpoints += 1

    def _slot(self, request: Request) -> int:
        """A slot for the state of a row; 0: there is none, or it would come too late."""
        if self._is_late or request.row < 0:
            self._skip("too late")
            return 0
        return self.take_slot()

    def take_slot(self) -> int:
        """A slot for a state, which somebody may lose for that; 0: there is none."""
        slot, loser = self.slots.take()
        if loser is not None:
            self._figures.num_evicted_checkpoints += 1
            self._state_to_host(loser, slot)
            if len(loser.tokens) < self._shapes.page_size:  # it was there for the state alone
                self.pool.add_free(node.page for node in self.tree.remove(loser))
        if not slot:
            self._skip("no slot")
        return slot

    def _skip(self, reason: str, slot: int = 0) -> None:
        self._figures.skipped[reason] += 1
        if slot:
            self.slots.give_back(slot)
