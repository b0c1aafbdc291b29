"""PrefixArrivals: prefixes that come back from the host's memory for requests that wait.

A request finds what the device has (`PrefixTree`). If the host leads further, the pieces of that
are copied to the device beside the steps that run. The request waits in the queue meanwhile, and
others enter. Once all have landed they are put into pages and a slot, and named in the tree as if
they had always been there. Then the request enters as it would anyway.
"""

from collections.abc import Sequence

from jaxspec.piece_plan import Piece, Write
from jaxspec.request import Request
from jaxspec.scheduler.host_tier import HostTier, Way
from jaxspec.scheduler.piece_index import Found
from jaxspec.scheduler.prefix_store import PrefixStore
from jaxspec.scheduler.prefix_tree import Node


class PrefixArrivals:
    """Puts what `tier` has of a request's text into `store`, whose requests have states or not."""

    def __init__(self, store: PrefixStore, tier: HostTier, *, has_states: bool):
        """Start with nothing on its way."""
        self._store, self._tier = store, tier
        self._has_states = has_states
        self._coming: dict[Request, Way] = {}

    def clear(self) -> None:
        """Nothing is on its way any more."""
        self._coming.clear()
        self._stage()

    def expect(self, request: Request) -> None:
        """A request will enter soon: what it will need of the host's begins to come."""
        if request not in self._coming and not request.in_flight:
            self._look(request)

    def is_coming(self, request: Request, num_pages: int, *, can_wait: bool) -> bool:
        """Whether a request that could enter on `num_pages` pages waits for what is on its way.

        If it does not, what was on its way is there from the next plan on. A request does not wait
        where it `can_wait` no longer, for nothing else runs: its device would idle as well.
        """
        way = self._look(request)
        while any(map(self._tier.is_loading, way.pieces)):
            if can_wait:
                return True
            self._tier.load()
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
        return self._coming[request].num_matched if request in self._coming else 0

    def _look(self, request: Request) -> Way:
        limit = len(request.tokens) - 1
        tree, salt = self._store.tree, request.cache_salt
        match, root = tree.match(salt, request.tokens, limit), tree.root(salt)
        way = self._tier.find(match, root, request.tokens, limit, has_states=self._has_states)
        tree.prune(salt)
        self._coming[request] = way
        self._stage()
        return way

    def _stage(self) -> None:
        self._tier.stage(piece for way in self._coming.values() for piece in way.pieces)

    def _bring(self, request: Request, way: Way) -> None:
        if bring(self._store, request, way):
            num_known = len(way.nodes) * self._store.tree.page_size
            self._tier.num_hits += way.num_tokens - num_known


def bring(store: PrefixStore, request: Request, way: Way) -> bool:
    """Plan to give all on the way that the device lacks a page, and the state a slot.

    Nothing, if pages are short. Returns whether they were not.
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
