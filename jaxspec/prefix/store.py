"""PrefixStore: the cached pages and states on the device, and the pending copies for the next plan.

Bookkeeping is one plan ahead of the device: copies run before the step of the plan that schedules
them. So a cached state can be found by a request before the device has copied it. Copies run in the
order in which they are planned. So a page or slot can be reused as soon as a copy of it is planned.
"""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jaxspec.plan.block_plan import Block, Read, Write
from jaxspec.plan.plan import SlotCopy, StateExport
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.prefix.block_index import BlockRef
from jaxspec.prefix.host_tier import HostPrefixMatch, HostTier
from jaxspec.prefix.page_pool import PagePool
from jaxspec.prefix.tree import Node, PrefixTree
from jaxspec.requests.request import Request

TRIAL_SHARE = 1 / 4  # of the slots for states on trial, once all are taken; two slots at least

Copy = StateExport | Read | Write | SlotCopy
"""Export of a state, copy to or from a block, or start of a request at a cached prefix."""


@dataclasses.dataclass
class PrefixMetrics:
    """Counts over the life of an engine; tokens count on the first entry of a request."""

    num_queries: int = 0  # tokens looked up
    num_hits: int = 0  # tokens found in the cache
    num_without_state: int = 0  # tokens with cached pages but no cached state at their end
    num_resumed: int = 0  # tokens found by preempted requests when they entered again
    num_checkpoints: int = 0  # states cached
    num_evicted_checkpoints: int = 0
    num_evicted_pages: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason

    def of_request(self, num_tokens: int, num_cached: int, num_matched: int) -> None:
        """Count a request on its first entry into the batch."""
        self.num_queries += num_tokens
        self.num_hits += num_cached
        self.num_without_state += max(0, num_matched - num_cached)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "skipped": dict(self.skipped)}


class _Pending(NamedTuple):
    """Cached state of a preempted request whose length depends on steps in flight."""

    node: Node  # last page of the request in the tree
    pages: list[int]  # pages after it
    slot: int  # slot of the state


class PrefixStore:
    """Cached pages and states; evicts only pages that no request holds."""

    def __init__(self, shapes: StepShapes, metrics: PrefixMetrics, tier: HostTier | None = None):
        """Start empty, and count in `metrics`; evictions go to `tier` if there is one."""
        self.tree = PrefixTree(shapes.page_size)
        self.pool = PagePool(shapes.num_pages, self.tree, self.evict)
        self._shapes, self._metrics, self._tier = shapes, metrics, tier
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
        # State slots 1..num_checkpoints; slot 0 is null.
        self.free_slots = list(range(self._shapes.num_checkpoints, 0, -1))
        self.states: OrderedDict[Node, None] = OrderedDict()  # nodes with a slot, by last use
        self._on_trial: OrderedDict[Node, None] = OrderedDict()  # those of states not used yet
        self._pending: dict[Request, _Pending] = {}
        self.copies: list[Copy] = []  # before the step of the next plan

    # Running requests

    def touch(self, node: Node) -> None:
        """Mark the prefix that ends at `node` as used."""
        self.tree.touch(node)
        self._on_trial.pop(node, None)
        if node in self.states:
            self.states.move_to_end(node)

    def touch_before(self, request: Request, node: Node, length: int) -> None:
        """Mark the state cached at `length` tokens as used, if it is on the path to `node`.

        The request started at `node`, but other requests will diverge from it at `length`.
        """
        depth = length // self._shapes.page_size
        if depth <= node.depth:
            while node.parent is not None and node.depth > depth:
                node = node.parent
            self._has(node, self._tail(request, length))

    @property
    def lets_in(self) -> bool:
        """True if a request enters at a cached prefix with the next plan."""
        return any(isinstance(copy, SlotCopy) for copy in self.copies)

    def take_copies(self) -> list[Copy]:
        """Return the copies to run before the step of the current plan, in order."""
        copies, self.copies = self.copies, []
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

    def keep(
        self,
        request: Request,
        node: Node,
        length: int,
        *,
        gives_page: bool = False,
        on_trial: bool = False,
    ) -> None:
        """Cache the state of a row at `length` tokens; `node` is their last full page.

        A partly filled page is copied, or with `gives_page` taken over from a request that leaves.
        States on trial that no request has used have few slots, so that prompts that are never
        repeated leave the states of others; they are not copied to the host.
        """
        tail = self._tail(request, length)
        if length < 1 or node.depth != length // self._shapes.page_size or self._has(node, tail):
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
        self._put(node, tail, target or page, slot, on_trial=on_trial)
        self.pool.release([target] if target else [])
        self.copies.append(StateExport(request.row, slot, source, target))

    # Requests preempted while steps were in flight

    def keep_unsettled(self, request: Request, node: Node) -> None:
        """Cache the state of a row after all steps in flight, at a length known later."""
        if slot := self._slot(request):
            pages = request.pages[node.depth :]
            self.pool.share(pages)
            self.pool.num_droppable += len(pages)
            self._pending[request] = _Pending(node, pages, slot)
            self.copies.append(StateExport(request.row, slot))

    def settle(self, request: Request) -> None:
        """Assign the pending state of a request to its node, after its last step was collected.

        Does nothing without a pending state.
        """
        if request not in self._pending:
            return
        node, pages, slot = self._pop_pending(request)
        length, first = len(request.tokens) - 1, node.depth
        if first == 0:
            node = self.tree.root(request.cache_salt)
        if node.is_alive:
            node = self._add(request, node, length // self._shapes.page_size, pages)
        tail = self._tail(request, length)
        if node.is_alive and self._has(node, tail):
            self.free_slots.append(slot)
        else:
            self._put(node, tail, pages[node.depth - first] if tail else 0, slot)
        self.pool.release(pages)

    def drop(self, request: Request) -> None:
        """Drop the pending state of a request, if any."""
        if request in self._pending:
            pending = self._pop_pending(request)
            self._skip("dropped", pending.slot)
            self.pool.release(pending.pages)

    def _pop_pending(self, request: Request) -> _Pending:
        pending = self._pending.pop(request)
        self.pool.num_droppable -= len(pending.pages)
        return pending

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
        if self._tier is not None:
            self.copies += self._tier.save_pages(gone)
        for node in gone:
            if node.checkpoint:
                self._evict_state(node)
        self._metrics.num_evicted_pages += len(gone)
        return [node.page for node in gone]

    def _evict_state(self, node: Node) -> None:
        if self._tier is not None and node not in self._on_trial:
            self.copies += self._tier.save_state(node)
        self._on_trial.pop(node, None)
        del self.states[node]
        self.free_slots.append(node.checkpoint)
        self.tree.set_checkpoint(node, 0)
        self._metrics.num_evicted_checkpoints += 1

    # Blocks

    def restore(self, salt: Hashable, match: HostPrefixMatch) -> bool:
        """Plan writes of the blocks of a match to newly allocated pages and a state slot.

        Return False without any effect if pages are short.
        """
        there = [node.page for node in match.nodes]
        self.pool.share(there)  # held, so that allocations do not evict them
        count = len(match.pages) + bool(match.state and match.state.tokens)
        has_room = count <= self.pool.num_free
        if has_room:
            pages = self.pool.allocate(count)
            node = match.nodes[-1] if match.nodes else self.tree.root(salt)
            for found, page in zip(match.pages, pages, strict=False):
                node = self.tree.add(node, found.tokens, page)
            self.copies += _writes(match.pages, pages)
            if match.state is not None:
                self._restore_state(match.state, node, pages[len(match.pages) :])
            self.pool.release(pages)
        self.pool.release(there)
        self.tree.prune(salt)
        return has_room

    def _restore_state(self, state: BlockRef, node: Node, tail: Sequence[int]) -> None:
        """Plan the write of a state to a slot; `tail` holds its partly filled page, if any."""
        slot = self._take_slot()
        if slot:
            self._put(node, state.tokens, tail[0] if tail else 0, slot)
            self.copies.append(Write(state.block, (0,) * len(tail), tuple(tail), slot))

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

    def _has(self, node: Node, tail: Sequence[int]) -> bool:
        """Return whether this state is cached; a hit marks it as used."""
        there = node.tails.get(tuple(tail)) if tail else node
        if there is None or not there.checkpoint:
            return False
        self.touch(there)
        return True

    def _put(
        self, node: Node, tail: Sequence[int], page: int, slot: int, *, on_trial: bool = False
    ) -> None:
        """Assign a slot to the state after `node` and `tail`, whose held page is `page`.

        Skipped if the allocation of the page or slot has evicted `node`.
        """
        if not node.is_alive:
            self._skip("no page", slot)
            return
        node = self.tree.add(node, tail, page) if tail else node
        self.tree.set_checkpoint(node, slot)
        self.states[node] = None
        if on_trial:
            self._on_trial[node] = None
        self._metrics.num_checkpoints += 1

    def _slot(self, request: Request) -> int:
        """Return a slot for the state of a row; 0 if there is none or it is too late."""
        if self.lets_in or request.row < 0:  # states are exported before a request enters
            self._skip("too late")
            return 0
        return self._take_slot()

    def _take_slot(self) -> int:
        """Return a slot for a state, evicting another one if needed; 0 if there is none."""
        if not self.free_slots and self.states:
            most = max(2, int(TRIAL_SHARE * self._shapes.num_checkpoints))
            is_full = len(self._on_trial) >= most
            oldest = next(iter(self._on_trial if is_full else self.states))
            self._evict_state(oldest)
            if len(oldest.tokens) < self._shapes.page_size:  # a tail exists only for its state
                self.pool.add_free(node.page for node in self.tree.remove(oldest))
        if not self.free_slots:
            self._skip("no slot")
            return 0
        return self.free_slots.pop()

    def _skip(self, reason: str, slot: int = 0) -> None:
        self._metrics.skipped[reason] += 1
        if slot:
            self.free_slots.append(slot)


def _writes(found: Sequence[BlockRef], pages: Sequence[int]) -> list[Write]:
    """Return one write per block, with the page for each page found."""
    by_block: dict[Block, list[tuple[int, int]]] = {}
    for each, page in zip(found, pages, strict=False):
        by_block.setdefault(each.block, []).append((each.place, page))
    return [
        Write(block, tuple(place for place, _ in moves), tuple(page for _, page in moves))
        for block, moves in by_block.items()
    ]
