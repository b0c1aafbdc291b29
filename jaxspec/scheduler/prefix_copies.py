"""Copies of kept prefixes: out of the pools for another engine, and from another engine into them.

Both are planned between steps, behind all that was planned before. What comes in is put into pages
and a slot at once, and named in the tree as if it had been computed here. So a request finds it as
it finds any prefix, and whoever needs room may take that before.
"""

from jaxspec.piece_plan import Copied, Piece, Read
from jaxspec.request import Request
from jaxspec.scheduler.host_tier import Way
from jaxspec.scheduler.piece_index import Found
from jaxspec.scheduler.prefix_arrivals import bring
from jaxspec.scheduler.prefix_cache import PrefixCache


def copy_out(prefixes: PrefixCache, request: Request) -> Copied:
    """Plan to copy to the host what the device has of a request's text."""
    hit, size = prefixes.find(request), prefixes.shapes.piece_pages
    reads = [
        Read(Piece(is_state=False), hit.pages[first : first + size])
        for first in range(0, len(hit.pages), size)
    ]
    pages, state = tuple(read.piece for read in reads), None
    if hit.checkpoint:
        state = Piece(is_state=True)
        tail = (hit.tail_page,) if hit.tail_page else ()
        reads.append(Read(state, tail, hit.checkpoint))
    prefixes.store.copies += reads
    return Copied(hit.num_cached, pages, state)


def copy_in(prefixes: PrefixCache, request: Request, copied: Copied) -> None:
    """Plan to keep what another engine computed of a request's text, if there is room for it.

    Nothing, if as much of it is here, or the engine keeps no prefixes.
    """
    shapes, store = prefixes.shapes, prefixes.store
    has_states = shapes.num_checkpoints > 0
    is_fit = shapes.prefix_caching != "off" and has_states == (copied.state is not None)
    if not is_fit or prefixes.find(request).num_cached >= copied.num_tokens:
        return
    size, tokens = shapes.page_size, tuple(request.tokens)
    num_full = copied.num_tokens // size
    nodes = store.tree.match(request.cache_salt, tokens, num_full * size).nodes
    pages = [
        Found(
            tokens[index * size : (index + 1) * size],
            copied.pages[index // shapes.piece_pages],
            index % shapes.piece_pages,
        )
        for index in range(len(nodes), num_full)
    ]
    state = None
    if copied.state is not None:
        state = Found(tokens[num_full * size : copied.num_tokens], copied.state)
    bring(store, request, Way(copied.num_tokens, nodes, tuple(pages), state))
