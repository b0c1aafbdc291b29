"""HostTier: pages and states that the device gave up, in the host's memory for requests to come.

What it has lies in pieces, which hold pages of any texts in the order in which the device gave them
up. Its index is one of its own beside the tree of the device (`PieceIndex`). Whole pieces go, those
used longest ago first: to files, if there is a folder for them (`DiskTier`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxspec.piece_plan import Piece, Read
from jaxspec.scheduler.disk_tier import DiskTier
from jaxspec.scheduler.piece_index import Found, Key, PieceIndex
from jaxspec.scheduler.prefix_tree import Match, Node, chained, digest_of

MAX_SECONDS = 10.0  # that an engine with nothing else to do waits for a disk


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
    """Pieces by their last use, in at most `max_bytes` of the host's memory, and on `disk`."""

    def __init__(
        self,
        max_bytes: int,
        page_size: int,
        mover: PieceMover,
        disk: DiskTier | None = None,
        *,
        has_states: bool,
    ):
        """Start empty; `mover` knows the size of pieces, and copies them to the device.

        `has_states`: whether a request needs a state as well as pages.
        """
        self.max_bytes, self._page_size, self._has_states = max_bytes, page_size, has_states
        self.mover, self.disk = mover, disk
        self.num_read_pages = self.num_read_states = 0  # in its whole life
        self.num_evicted_pieces = self.num_hits = 0
        self.clear()

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        if self.disk is not None:
            self.disk.forget_unread()
        self.index = PieceIndex()
        self.num_bytes = 0

    def figures(self) -> dict[str, Any]:
        """Its counts, for people. Hits are tokens that it gave back to the device."""
        counts = {
            "num_hits": self.num_hits,
            "num_read_pages": self.num_read_pages,
            "num_read_states": self.num_read_states,
            "num_pieces": len(self.index),
            "num_bytes": self.num_bytes,
            "max_bytes": self.max_bytes,
            "num_evicted_pieces": self.num_evicted_pieces,
            "seconds": self.mover.seconds,
        }
        return counts | ({} if self.disk is None else {"disk": self.disk.figures()})

    # What the device gives up.

    def lacks_page(self, node: Node) -> bool:
        """Whether a whole page of the tree is in no piece; one that is there is of use."""
        if len(node.tokens) < self._page_size:
            return False
        return self._lacks(self.index.page(_key(node)))

    def lacks_state(self, node: Node) -> bool:
        """Whether the state behind a node is in no piece; one that is there is of use."""
        return self._lacks(self.index.state(_key(node)))

    def add_pages(self, nodes: Sequence[Node]) -> Read:
        """A new piece of the pages of these nodes; what is to be read for it."""
        piece = Piece(is_state=False)
        self.num_read_pages += len(nodes)
        self._add(piece, [_key(node) for node in nodes])
        return Read(piece, tuple(node.page for node in nodes))

    def add_state(self, node: Node, slot: int) -> Read:
        """A new piece of the state behind a node, in a slot, and of its page if that is not whole.

        What is to be read for it.
        """
        piece = Piece(is_state=True)
        self.num_read_states += 1
        self._add(piece, [_key(node)])
        is_tail = len(node.tokens) < self._page_size
        return Read(piece, (node.page,) if is_tail else (), slot)

    # What requests find.

    def versions(self) -> tuple[int, ...]:
        """Numbers that differ once `find` may give something else.

        What the disk has done is noted first.
        """
        if self.disk is not None:
            self.disk.poll()
        return tuple(index.version for index in self._indices())

    def find(self, match: Match, root: Node, tokens: Sequence[int], limit: int) -> Way:
        """How far into the first `limit` tokens a request could begin if the host's pieces came
        back.

        `match`: what the device has of `tokens`, below `root`. `num_tokens` is 0 if the device
        alone leads as far.
        """
        size, digest, depth, has_states = self._page_size, digest_of(root), 0, self._has_states
        pages, found = list[Found](), (0, None)
        while True:
            rest = tuple(tokens[depth * size : min((depth + 1) * size, limit)])
            if has_states and (tail := self._tail(digest, rest)) is not None:
                found = depth, tail
            if len(rest) < size:
                break
            key = Key(digest, rest)
            if depth < len(match.nodes):
                digest = digest_of(match.nodes[depth])
            elif (page := self._find(PieceIndex.page, key)) is not None:
                digest = chained(digest, rest)
                pages.append(page)
            else:
                break
            depth += 1
            if not has_states:
                found = depth, None
            elif (state := self._find(PieceIndex.state, key)) is not None:
                found = depth, state._replace(tokens=())
        num_matched = depth * size
        depth, state = found
        num_tokens = depth * size + (len(state.tokens) if state is not None else 0)
        if num_tokens <= match.start(size, has_states=has_states)[0]:
            return Way(0, (), (), None, num_matched)
        nodes = match.nodes[:depth]
        return Way(num_tokens, nodes, tuple(pages[: depth - len(nodes)]), state, num_matched)

    def stage(self, pieces: Iterable[Piece], ahead: Iterable[Piece] = ()) -> None:
        """These pieces are of use soon, and no others: they begin to come to the device.

        `ahead`: those of use later. Requests may share pieces, each of which comes once.
        """
        first = list(dict.fromkeys(pieces))
        wanted = list(dict.fromkeys((*first, *ahead)))
        self.index.touch(wanted)
        if self.disk is not None:
            self.disk.want(first, wanted)
        self.mover.stage(wanted)

    def is_loading(self, piece: Piece) -> bool:
        """Whether a piece is on disk alone, and has to come to the host's memory first."""
        return self.disk is not None and self.disk.is_loading(piece)

    def load(self, pieces: Iterable[Piece]) -> bool:
        """Wait for those of the pieces that are on disk, for nothing else runs.

        False: it took too long, and some are not there yet.
        """
        return self.disk is None or self.disk.wait(pieces, MAX_SECONDS)

    def close(self) -> None:
        """Wait until what left the memory is written, and give the memory back."""
        if self.disk is not None:
            self.disk.close()
        self.clear()

    # How.

    def _indices(self) -> list[PieceIndex]:
        return [self.index, *([] if self.disk is None else [self.disk.index])]

    def _find(self, look: Callable[[PieceIndex, Key], Found | None], key: Key) -> Found | None:
        found = (look(index, key) for index in self._indices())
        return next((each for each in found if each is not None), None)

    def _tail(self, before: bytes, rest: tuple[int, ...]) -> Found | None:
        tails = [index.tail(before, rest, self._page_size) for index in self._indices()]
        fitting = [each for each in tails if each is not None]
        return max(fitting, key=lambda found: len(found.tokens), default=None)

    def _lacks(self, found: Found | None) -> bool:
        if found is not None:
            self.index.touch([found.piece])
        return found is None

    def _add(self, piece: Piece, keys: Sequence[Key]) -> None:
        self.index.add(piece, keys)
        self.num_bytes += self.mover.num_bytes(is_state=piece.is_state)
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self.index))
            gone = self.index.forget(oldest)
            self.num_bytes -= self.mover.num_bytes(is_state=oldest.is_state)
            self.num_evicted_pieces += 1
            if self.disk is not None:
                self.disk.put(oldest, gone)


def _key(node: Node) -> Key:
    assert node.parent is not None
    return Key(digest_of(node.parent), node.tokens)
