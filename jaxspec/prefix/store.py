"""PrefixStore: the cached pages and states on the device, and the pending copies for the next plan.

Bookkeeping is one plan ahead of the device: copies run before the step of the plan that schedules
them. So a cached state can be found by a request before the device has copied it. Copies run in the
order in which they are planned. So a page or slot can be reused as soon as a copy of it is planned.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.plan.block_plan import Read, Write
from jaxspec.plan.plan import SlotCopy, StateExport
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.prefix.host_tier import HostTier
from jaxspec.prefix.page_pool import PagePool, PrefixMetrics
from jaxspec.prefix.state_slots import StateSlots
from jaxspec.prefix.tree import Node, PrefixTree
from jaxspec.requests.request import Request

Copy = StateExport | Read | Write | SlotCopy
"""Export of a state, copy to or from a block, or start of a request at a cached prefix."""


class _Pending(NamedTuple):
    """Cached state of a preempted request whose length depends on steps in flight."""

    node: Node  # last page of the request in the tree
    pages: list[int]  # pages after it
    slot: int  # slot of the state


class PrefixStore:
    """The `Reserve` of its `pool`; evicts only pages that no request holds."""

    def __init__(self, shapes: StepShapes, figures: PrefixMetrics, tier: HostTier | None = None):
        """Start empty, and count in `figures`; evictions go to `tier` if there is one."""
        self.tree = PrefixTree(shapes.page_size)
        self.pool = PagePool(shapes.num_pages, self)
        self._shapes, self._figures, self._tier = shapes, figures, tier
        # A copy of a block takes as long as one of a page, so whole blocks are evicted to the host.
        # At most an eighth of a small pool is evicted at once.
        many = min(shapes.block_pages, max(1, shapes.num_pages // 8))
        self._num_at_once = 1 if tier is None else many
        self._forget()

    def clear(self) -> None:
        """Drop all cached prefixes; requests keep the pages that they hold."""
        for request in list(self._pending):
            self.drop(request)
        self.pool.add_free(self.tree.clear())
        self._forget()

    def _forget(self) -> None:
        self.slots = StateSlots(self._shapes.num_checkpoints, self.tree)
        self._pending: dict[Request, _Pending] = {}
        self.copies: list[Copy] = []  # before the step of the next plan
        self._is_late = False

    def __len__(self) -> int:
        """Number of cached pages."""
        return len(self.tree)

    # Running requests

    def touch(self, node: Node) -> None:
        """Mark the prefix that ends at `node` as used."""
        self.tree.touch(node)
        self.slots.touch(node)

    def touch_before(self, request: Request, node: Node, length: int) -> None:
        """Mark the state cached at `length` tokens as used, if it is on the path to `node`.

        The request started at `node`, but other requests will diverge from it at `length`.
        """
        depth = length // self._shapes.page_size
        if depth <= node.depth:
            while node.parent is not None and node.depth > depth:
                node = node.parent
            self.has(node, self._tail(request, length))

    def begin_late(self) -> None:
        """Allow no more exports of states in the next plan: a request enters in it."""
        self._is_late = True

    def take_copies(self) -> list[Copy]:
        """Return the copies to run before the step of the current plan, in order."""
        copies, self.copies, self._is_late = self.copies, [], False
        return copies

    def publish(self, request: Request, node: Node, num_computed: int) -> Node:
        """Add the full pages of the first `num_computed` tokens to the tree, after `node`.

        Pages whose tokens the tree already has are not added. Returns the node of the last page.
        """
        count = num_computed // self._shapes.page_size
        if count <= node.depth and node.is_alive:
            return node
        if not node.is_alive:  # evicted page of another request: add this request's own pages
            node = self.tree.root(request.cache_salt)
        return self._add(request, node, count, request.pages[node.depth :])

    def keep(self, request: Request, node: Node, length: int, *, gives_page: bool = False) -> None:
        """Cache the state of a row at `length` tokens; `node` is their last full page.

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
        self.copies.append(StateExport(request.row, slot, source, target))

    # Requests preempted while steps were in flight

    def keep_unsettled(self, request: Request, node: Node) -> None:
        """Cache the state of a row after all steps in flight, at a length known later."""
        if slot := self._slot(request):
            pages = request.pages[node.depth :]
            self.pool.share(pages)
            self._pending[request] = _Pending(node, pages, slot)
            self.copies.append(StateExport(request.row, slot))

    def settle(self, request: Request) -> None:
        """Assign the pending state of a request to its node, after its last step was collected.

        Does nothing without a pending state.
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
        """Drop the pending state of a request, if any."""
        if request in self._pending:
            pending = self._pending.pop(request)
            self._skip("dropped", pending.slot)
            self.pool.release(pending.pages)

    # `Reserve`

    @property
    def num_evictable(self) -> int:
        """Pages in the tree or of pending states that no running request holds."""
        pending = sum(len(each.pages) for each in self._pending.values())
        return self.tree.num_evictable + pending

    def holds(self, page: int) -> bool:
        return self.tree.holds(page)

    def pin(self, page: int) -> None:
        self.tree.pin(page)

    def unpin(self, page: int) -> None:
        self.tree.unpin(page)

    def evict(self) -> list[int]:
        """Evict the least recently used page, or with a host tier up to a block of pages.

        If the tree has none, drop the oldest pending state, whose pages are then free.
        """
        if not self.tree.num_evictable:
            self.drop(next(iter(self._pending)))
            return []  # `drop` has freed its pages
        gone = list[Node]()
        while self.tree.num_evictable and len(gone) < self._num_at_once:
            gone += self.tree.remove(self.tree.oldest())
        self._to_host(gone)
        self._figures.num_evicted_checkpoints += sum([self.slots.drop(node) for node in gone])
        self._figures.num_evicted_pages += len(gone)
        return [node.page for node in gone]

    # Helpers

    def _tail(self, request: Request, length: int) -> list[int]:
        """Return the tokens after the last full page of the first `length` tokens."""
        return request.tokens[length - length % self._shapes.page_size : length]

    def _add(self, request: Request, node: Node, count: int, pages: list[int]) -> Node:
        """Add `pages` after `node` until the path has `count` pages."""
        size, first = self._shapes.page_size, node.depth
        for index in range(first, count):
            tokens = request.tokens[index * size : (index + 1) * size]
            node = self.tree.add(node, tokens, pages[index - first])
        return node

    def _to_host(self, gone: Sequence[Node]) -> None:
        """Plan copies of evicted pages and states that the host lacks."""
        if self._tier is None:
            return
        pages = [node for node in gone if self._tier.lacks_page(node)]
        size = self._shapes.block_pages
        for first in range(0, len(pages), size):
            self.copies.append(self._tier.add_pages(pages[first : first + size]))
        for node in gone:
            if node.checkpoint:
                self._state_to_host(node, node.checkpoint)

    def _state_to_host(self, node: Node, slot: int) -> None:
        if self._tier is not None and self._tier.lacks_state(node):
            self.copies.append(self._tier.add_state(node, slot))

    def has(self, node: Node, tail: Sequence[int]) -> bool:
        """Return whether this state is cached; a hit marks it as used."""
        there = node.tails.get(tuple(tail)) if tail else node
        if there is None or not there.checkpoint:
            return False
        self.touch(there)
        return True

    def put(self, node: Node, tail: Sequence[int], page: int, slot: int) -> None:
        """Assign a slot to the state after `node` and `tail`, whose held page is `page`.

        Skipped if the allocation of the page or slot has evicted `node`.
        """
        if not node.is_alive:
            self._skip("no page", slot)
            return
        self.slots.put(self.tree.add(node, tail, page) if tail else node, slot)
        self._figures.num_checkpoints += 1

    def _slot(self, request: Request) -> int:
        """Return a slot for the state of a row; 0 if there is none or it is too late."""
        if self._is_late or request.row < 0:
            self._skip("too late")
            return 0
        return self.take_slot()

    def take_slot(self) -> int:
        """Return a slot for a state, evicting another one if needed; 0 if there is none."""
        slot, loser = self.slots.take()
        if loser is not None:
            self._figures.num_evicted_checkpoints += 1
            self._state_to_host(loser, slot)
            if len(loser.tokens) < self._shapes.page_size:  # a tail exists only for its state
                self.pool.add_free(node.page for node in self.tree.remove(loser))
        if not slot:
            self._skip("no slot")
        return slot

    def _skip(self, reason: str, slot: int = 0) -> None:
        self._figures.skipped[reason] += 1
        if slot:
            self.slots.give_back(slot)
