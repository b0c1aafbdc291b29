"""Copies of kept prefixes: out of the pools for another engine, and from another engine into them.

Both are made between steps, behind all that is planned. What comes in is put into the tree as if it
had been computed here: so a request finds it as it finds any prefix, and whoever needs room may
give it up before that.
"""

from collections.abc import Sequence

from jaxspec.piece_plan import Copied, Piece, Read, Write, pack_piece
from jaxspec.plan import READ, READ_STATE, WRITE, WRITE_STATE, StepPlan
from jaxspec.request import Request
from jaxspec.scheduler.prefix_cache import PrefixCache
from jaxspec.scheduler.prefix_store import PrefixStore
from jaxspec.scheduler.prefix_tree import Node


def copy_out(prefixes: PrefixCache, request: Request) -> tuple[Copied, list[StepPlan]]:
    """What is kept of a request's text, and the plans that copy it to the host."""
    hit, size = prefixes.find(request), prefixes.shapes.piece_pages
    reads = [
        Read(Piece(is_state=False), hit.pages[first : first + size])
        for first in range(0, len(hit.pages), size)
    ]
    plans = [StepPlan(READ, pack_piece(read, size), piece=read.piece) for read in reads]
    state = None
    if hit.checkpoint:
        state = Piece(is_state=True)
        tail = (hit.tail_page,) if hit.tail_page else ()
        packed = pack_piece(Read(state, tail, hit.checkpoint), 1)
        plans.append(StepPlan(READ_STATE, packed, piece=state))
    return Copied(hit.num_cached, tuple(read.piece for read in reads), state), plans


def copy_in(prefixes: PrefixCache, request: Request, copied: Copied) -> list[StepPlan]:
    """Keep what another engine computed of a request's text, and the plans that put it here.

    As much as there is room for; nothing, if the engine keeps no prefixes.
    """
    shapes, store = prefixes.shapes, prefixes.store
    has_states = shapes.num_checkpoints > 0
    if shapes.prefix_caching == "off" or has_states != (copied.state is not None):
        return []
    count = copied.num_tokens // shapes.page_size
    node, places = _published(store, request, count)
    plans = _writes(copied.pages, places, shapes.piece_pages)
    if has_states and node.depth == count:
        plans += _state(store, request, node, copied)
    _release(store, node)
    return plans


def _published(
    store: PrefixStore, request: Request, count: int
) -> tuple[Node, list[tuple[int, int]]]:
    """The node of the last of `count` full pages, and which of them are new: (index, page).

    All pages on the way there are held. There are fewer where the pool has no more.
    """
    size, node = store.tree.page_size, store.tree.root(request.cache_salt)
    new = list[tuple[int, int]]()
    for index in range(count):
        tokens = tuple(request.tokens[index * size : (index + 1) * size])
        child = node.children.get(tokens)
        if child is not None:
            store.pool.share([child.page])
        elif store.pool.num_free:
            (page,) = store.pool.allocate(1)
            child = store.tree.add(node, tokens, page)
            new.append((index, page))
        else:
            break
        node = child
    return node, new


def _writes(
    pieces: Sequence[Piece], places: Sequence[tuple[int, int]], size: int
) -> list[StepPlan]:
    """Plans that put full pages of pieces of `size` pages where `places` say: (index, page)."""
    plans = []
    for number, piece in enumerate(pieces):
        here = [(index % size, page) for index, page in places if index // size == number]
        if here:
            sources, targets = zip(*here, strict=True)
            packed = pack_piece(Write(piece, sources, targets), size)
            plans.append(StepPlan(WRITE, packed, piece=piece))
    return plans


def _state(store: PrefixStore, request: Request, node: Node, copied: Copied) -> list[StepPlan]:
    """The plan that puts the state behind a node, with the page of the tokens behind that."""
    tail = request.tokens[node.depth * store.tree.page_size : copied.num_tokens]
    if copied.state is None or store.has(node, tail) or not (store.pool.num_free or not tail):
        return []
    slot = store.take_slot()
    if not slot:
        return []
    pages = store.pool.allocate(1) if tail else []
    store.put(node, tail, pages[0] if pages else 0, slot)
    store.pool.release(pages)
    packed = pack_piece(Write(copied.state, (0,) * len(pages), tuple(pages), slot), 1)
    return [StepPlan(WRITE_STATE, packed, piece=copied.state)]


def _release(store: PrefixStore, node: Node) -> None:
    """Hold the pages from the root to a node no more."""
    while node.parent is not None:
        store.pool.release([node.page])
        node = node.parent
