"""PrefixArrivals: prefixes that come back from the host's memory for requests that wait.

A request finds what the device has (`PrefixTree`). If the host leads further, the pieces of that
are copied to the device beside the steps that run. The request waits in the queue meanwhile, and
others enter. Once all have landed they are put into pages and a slot, and named in the tree as if
they had always been there. Then the request enters as it would anyway.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.piece_plan import Piece, Write
from jaxspec.request import Request
from jaxspec.scheduler.host_tier import HostTier, Way
from jaxspec.scheduler.piece_index import Found
from jaxspec.scheduler.prefix_store import PrefixStore
from jaxspec.scheduler.prefix_tree import Match, Node
from jaxspec.scheduler.waiting_queue import urgency


class _Look(NamedTuple):
    """What there was of a request's text when it was last looked up."""

    version: tuple[int, ...]  # of what was looked at
    match: Match
    way: Way


class PrefixArrivals:
    """Puts what `tier` has of a request's text into `store`."""

    def __init__(self, store: PrefixStore, tier: HostTier):
        """Start with nothing on its way."""
        self._store, self._tier = store, tier
        self.clear()

    def clear(self) -> None:
        """Nothing is on its way any more."""
        self._coming: dict[Request, _Look] = {}
        self._stage()

    def expect(self, request: Request) -> None:
        """A request will enter soon: what it will need of the host's begins to come."""
        if request not in self._coming and not request.in_flight:
            self._look(request)

    def is_coming(self, request: Request, num_pages: int, *, can_wait: bool) -> bool:
        """Whether a request must wait for pieces on their way.

        If False, they are put into the pools in front of the next plan, on whose `num_pages` pages
        it enters. With `can_wait=False` (nothing else runs) it loads them at once instead, or goes
        without those that take too long.
        """
        way = self._look(request)
        while any(map(self._tier.is_loading, way.pieces)):
            if can_wait:
                return True
            if not self._tier.load(way.pieces):
                self.drop(request)
                return False
            way = self._look(request)  # what could not be read is there no more
        if not way.num_tokens:
            return False
        held = sum(node.is_held for node in way.nodes)
        if num_pages > self._store.pool.num_free + held:
            return False  # it can't enter
        if can_wait and not all(map(self._tier.mover.has_landed, way.pieces)):
            return True
        self._bring(request, way)
        return False

    def drop(self, request: Request) -> None:
        """Nothing need come for a request any more."""
        if self._coming.pop(request, None) is not None:
            self._stage()

    def num_matched(self, request: Request) -> int:
        """Tokens of a request that device and host knew when it was last looked up."""
        return self._coming[request].way.num_matched if request in self._coming else 0

    def match(self, request: Request) -> Match:
        """What the device has of a request's text now, but for its last token."""
        look, tree = self._coming.get(request), self._store.tree
        limit = len(request.tokens) - 1
        if look is not None and look.version[:2] == (limit, tree.version):
            return look.match
        return tree.match(request.cache_salt, request.tokens, limit)

    def _look(self, request: Request) -> Way:
        """What both have now; nothing is looked up again while neither has changed."""
        tree, salt = self._store.tree, request.cache_salt
        limit = len(request.tokens) - 1
        version = limit, tree.version, *self._tier.versions()
        look = self._coming.get(request)
        if look is None or look.version != version:
            match = self.match(request)
            way = self._tier.find(match, tree.root(salt), request.tokens, limit)
            tree.prune(salt)
            self._coming[request] = look = _Look(version, match, way)
            self._stage()
        elif any(piece.arrays is not None for piece in self._unfilled):
            self._stage()
        return look.way

    def _stage(self) -> None:
        """What waiting requests need begins to come, that of the most urgent one first."""
        # Among equals those that had entered before come first, as in the queue.
        waiting = sorted(self._coming, key=lambda each: (urgency(each), not each.generation))
        first, *others = [self._coming[each].way.pieces for each in waiting] or [[]]
        ahead = [piece for pieces in others for piece in pieces]
        self._tier.stage(first, ahead)
        self._unfilled = [piece for piece in (*first, *ahead) if piece.arrays is None]

    def _bring(self, request: Request, way: Way) -> None:
        if bring(self._store, request, way):
            num_known = len(way.nodes) * self._store.tree.page_size
            self._tier.num_hits += way.num_tokens - num_known


def bring(store: PrefixStore, request: Request, way: Way) -> bool:
    """Plan to give all on the way that the device lacks a page, and the state a slot.

    It does nothing and returns False if pages are short.
    """
    there = [node.page for node in way.nodes]
    store.pool.share(there)  # so that nothing takes them to make room
    count = len(way.pages) + bool(way.state and way.state.tokens)
    has_room = count <= store.pool.num_free
    if has_room:
        pages = store.pool.allocate(count)
        node = way.nodes[-1] if way.nodes else store.tree.root(request.cache_salt)
        for found, page in zip(way.pages, pages, strict=False):
            node = store.tree.add(node, found.tokens, page)
        store.copies += _writes(way.pages, pages)
        if way.state is not None:
            _bring_state(store, way.state, node, pages[len(way.pages) :])
        store.pool.release(pages)
    store.pool.release(there)
    store.tree.prune(request.cache_salt)
    return has_room


def _bring_state(store: PrefixStore, state: Found, node: Node, tail: Sequence[int]) -> None:
    """Put a state behind a node, or behind a part of a page, which `tail` holds one for."""
    slot = store.take_slot()
    if slot:
        store.put(node, state.tokens, tail[0] if tail else 0, slot)
        store.copies.append(Write(state.piece, (0,) * len(tail), tuple(tail), slot))


def _writes(found: Sequence[Found], pages: Sequence[int]) -> list[Write]:
    """What puts each page found where it is to be: a write for each piece."""
    by_piece: dict[Piece, list[tuple[int, int]]] = {}
    for each, page in zip(found, pages, strict=False):
        by_piece.setdefault(each.piece, []).append((each.place, page))
    return [
        Write(piece, tuple(place for place, _ in moves), tuple(page for _, page in moves))
        for piece, moves in by_piece.items()
    ]
