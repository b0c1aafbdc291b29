"""HostTier: pages and states that the device gave up, in the host's memory for requests to come.

It is an index of its own beside the tree of the device. What it has of a text lies in pieces, which
hold pages of any texts in the order in which the device gave them up. An entry is a page, whole or
in part, and is found by the digest of the text before it, salt included, and by its own tokens:

    digest of 0..3 ── 4..7 ── page 2 of piece 9      digest of 0..7 ── 8..11 ── page 0 of piece 11
                 └─── 4, 5 ── state in piece 10

A tree would not do: whole pieces are forgotten, those used longest ago first, whatever hangs on
their pages. Pages behind a missing one are of no use until it is there again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxspec.piece_plan import Piece, Read
from jaxspec.scheduler.prefix_tree import Match, Node, chained, digest_of


class PieceMover(Protocol):
    """Who copies pieces to the device before they are put into the pools (`runner.pieces`)."""

    seconds: float  # for which pieces were on their way

    def num_bytes(self, *, is_state: bool) -> int:
        """Bytes of a piece."""
        ...

    def stage(self, pieces: Iterable[Piece]) -> None:
        """Begin to copy these pieces to the device beside the steps that run; drop all others."""
        ...

    def has_landed(self, piece: Piece) -> bool:
        """Whether a piece is on the device, or goes there only when it is put into the pools."""
        ...


class Entry:
    """A page of tokens on the host, a state behind it, or both. `HostTier` alone changes it."""

    __slots__ = ("before", "piece", "place", "state", "tokens")

    def __init__(self, before: bytes, tokens: tuple[Any, ...]):
        """Be found behind the text of digest `before`."""
        self.before, self.tokens = before, tokens
        self.piece: Piece | None = None  # that has the page, at `place`
        self.place = 0
        self.state: Piece | None = None  # of the state; if the page is not whole, it has that too


class Found(NamedTuple):
    """An entry's page or state as it was when it was found: the host may forget it meanwhile."""

    tokens: tuple[int, ...]
    piece: Piece
    place: int = 0


class Way(NamedTuple):
    """A place in a text up to which device and host together have what a request needs."""

    num_tokens: int  # up to there; 0: there is no such place
    nodes: Sequence[Node]  # pages that the device has, from the root on
    pages: tuple[Found, ...]  # those behind them that it lacks
    state: Found | None  # at the end; None: the model has no states
    num_matched: int = 0  # tokens whose whole pages one of the two has, with a state or not

    @property
    def pieces(self) -> list[Piece]:
        """Those that must come to the device, each once."""
        found = [*([] if self.state is None else [self.state]), *self.pages]
        return list(dict.fromkeys(each.piece for each in found))


class HostTier:
    """Entries by digest and tokens; pieces by their last use, in at most `max_bytes`."""

    def __init__(self, max_bytes: int, page_size: int, mover: PieceMover):
        """Start empty; `mover` knows the size of pieces, and copies them to the device."""
        self.max_bytes, self._page_size, self.mover = max_bytes, page_size, mover
        self.num_read_pages = self.num_read_states = 0  # in its whole life
        self.num_evicted_pieces = self.num_hits = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._below: dict[bytes, dict[tuple[Any, ...], Entry]] = {}
        self._pieces: OrderedDict[Piece, list[Entry]] = OrderedDict()  # by last use
        self.num_bytes = 0

    def __len__(self) -> int:
        """Pieces."""
        return len(self._pieces)

    def figures(self) -> dict[str, Any]:
        """Its counts, for people. Hits are tokens that it gave back to the device."""
        return {
            "num_hits": self.num_hits,
            "num_read_pages": self.num_read_pages,
            "num_read_states": self.num_read_states,
            "num_pieces": len(self),
            "num_bytes": self.num_bytes,
            "max_bytes": self.max_bytes,
            "num_evicted_pieces": self.num_evicted_pieces,
            "seconds": self.mover.seconds,
        }

    # What the device gives up.

    def lacks_page(self, node: Node) -> bool:
        """Whether a whole page of the tree is in no piece; one that is there is of use."""
        entry = self._find(node)
        if entry is None or entry.piece is None:
            return len(node.tokens) == self._page_size
        self.touch([entry.piece])
        return False

    def lacks_state(self, node: Node) -> bool:
        """Whether the state behind a node is in no piece; one that is there is of use."""
        entry = self._find(node)
        if entry is None or entry.state is None:
            return True
        self.touch([entry.state])
        return False

    def add_pages(self, nodes: Sequence[Node]) -> Read:
        """A new piece of the pages of these nodes; what is to be read for it."""
        piece = Piece(is_state=False)
        entries = [self._entry(node) for node in nodes]
        for place, entry in enumerate(entries):
            entry.piece, entry.place = piece, place
        self.num_read_pages += len(nodes)
        self._add(piece, entries)
        return Read(piece, tuple(node.page for node in nodes))

    def add_state(self, node: Node, slot: int) -> Read:
        """A new piece of the state behind a node, in a slot, and of its page if that is not whole.

        What is to be read for it.
        """
        piece, entry = Piece(is_state=True), self._entry(node)
        entry.state = piece
        self.num_read_states += 1
        self._add(piece, [entry])
        return Read(piece, (node.page,) if self._is_tail(entry) else (), slot)

    # What requests find.

    def find(
        self, match: Match, root: Node, tokens: Sequence[int], limit: int, *, has_states: bool
    ) -> Way:
        """The deepest place in `tokens`, of which `limit` count, that the host leads to.

        `match`: what the device has of them, below `root`. There may be no place that is deeper.
        """
        size, digest, depth = self._page_size, digest_of(root), 0
        pages, found = list[Found](), (0, None)
        while True:
            rest = tuple(tokens[depth * size : min((depth + 1) * size, limit)])
            below = self._below.get(digest, {})
            if has_states and (tail := _tail(below, rest, size)) is not None:
                found = depth, tail
            entry = below.get(rest) if len(rest) == size else None
            if depth < len(match.nodes):
                digest = digest_of(match.nodes[depth])
            elif entry is not None and entry.piece is not None:
                digest = chained(digest, rest)
                pages.append(Found(rest, entry.piece, entry.place))
            else:
                break
            depth += 1
            if not has_states:
                found = depth, None
            elif entry is not None and entry.state is not None:
                found = depth, Found((), entry.state)
        num_matched = depth * size
        depth, state = found
        num_tokens = depth * size + (len(state.tokens) if state is not None else 0)
        if num_tokens <= self._known(match, has_states=has_states):
            return Way(0, (), (), None, num_matched)
        nodes = match.nodes[:depth]
        return Way(num_tokens, nodes, tuple(pages[: depth - len(nodes)]), state, num_matched)

    def touch(self, pieces: Iterable[Piece]) -> None:
        """Pieces are of use."""
        for piece in pieces:
            if piece in self._pieces:
                self._pieces.move_to_end(piece)

    # How.

    def _known(self, match: Match, *, has_states: bool) -> int:
        """Tokens behind which a request can begin with what the device has."""
        if not has_states:
            return len(match.nodes) * self._page_size
        node = match.at_checkpoint
        if node is None or node.parent is None:
            return 0
        return (node.depth - 1) * self._page_size + len(node.tokens)

    def _is_tail(self, entry: Entry) -> bool:
        return len(entry.tokens) < self._page_size

    def _find(self, node: Node) -> Entry | None:
        assert node.parent is not None
        return self._below.get(digest_of(node.parent), {}).get(node.tokens)

    def _entry(self, node: Node) -> Entry:
        assert node.parent is not None
        before = digest_of(node.parent)
        family = self._below.setdefault(before, {})
        return family.setdefault(node.tokens, Entry(before, node.tokens))

    def _add(self, piece: Piece, entries: list[Entry]) -> None:
        self._pieces[piece] = entries
        self.num_bytes += self.mover.num_bytes(is_state=piece.is_state)
        while self.num_bytes > self.max_bytes:
            self._forget(next(iter(self._pieces)))
            self.num_evicted_pieces += 1

    def _forget(self, piece: Piece) -> None:
        for entry in self._pieces.pop(piece):
            if entry.piece is piece:
                entry.piece = None
            if entry.state is piece:
                entry.state = None
            if entry.piece is None and entry.state is None:
                family = self._below[entry.before]
                del family[entry.tokens]
                if not family:
                    del self._below[entry.before]
        self.num_bytes -= self.mover.num_bytes(is_state=piece.is_state)


def _tail(below: dict[tuple[Any, ...], Entry], rest: tuple[int, ...], size: int) -> Found | None:
    """The state behind the longest part of a page that `rest` begins with."""
    fitting = [
        Found(tokens, entry.state)
        for tokens, entry in below.items()
        if len(tokens) < size and tokens == rest[: len(tokens)] and entry.state is not None
    ]
    return max(fitting, key=lambda found: len(found.tokens), default=None)
