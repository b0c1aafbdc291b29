from jaxspec.piece_plan import Piece
from jaxspec.scheduler.piece_index import Found, Key, PieceIndex

A, B = b"text before", b"another one"


def test_pages_and_states_are_found_by_the_text_before_them_and_their_own():
    index, pages, state = PieceIndex(), Piece(is_state=False), Piece(is_state=True)
    index.add(pages, [Key(A, (1, 2)), Key(B, (1, 2))])
    index.add(state, [Key(A, (1, 2))])
    assert index.page(Key(B, (1, 2))) == Found((1, 2), pages, 1)
    assert index.state(Key(A, (1, 2))) == Found((1, 2), state)
    assert index.state(Key(B, (1, 2))) is index.page(Key(A, (1, 3))) is None
    assert index.forget(pages) == (Key(A, (1, 2)), Key(B, (1, 2)))
    assert index.page(Key(A, (1, 2))) is None and index.state(Key(A, (1, 2))) is not None
    index.forget(state)
    assert len(index) == 0 and not index._below and not index._lengths


def test_what_a_newer_piece_has_stays_when_the_older_one_goes():
    index, old, new = PieceIndex(), Piece(is_state=False), Piece(is_state=False)
    index.add(old, [Key(A, (1, 2)), Key(A, (3, 4))])
    index.add(new, [Key(A, (1, 2))])
    index.forget(old)
    assert index.page(Key(A, (1, 2))).piece is new and index.page(Key(A, (3, 4))) is None


def test_the_longest_part_of_a_page_counts():
    index, pieces = PieceIndex(), [Piece(is_state=True) for _ in range(3)]
    for piece, tokens in zip(pieces, [(5,), (5, 6), (7, 8, 9)], strict=True):
        index.add(piece, [Key(A, tokens)])
    assert index.tail(A, (5, 6, 7), 4).piece is pieces[1]
    assert index.tail(A, (5,), 4).piece is pieces[0]
    assert index.tail(A, (7, 8), 4) is index.tail(B, (5, 6), 4) is None
    assert index.tail(A, (7, 8, 9), 3) is None  # a whole page is none
    index.forget(pieces[1])
    assert index.tail(A, (5, 6, 7), 4).piece is pieces[0]


def test_a_tail_is_looked_up_and_no_sibling_is_walked():
    class Part(tuple):
        """A part of a page, which nobody compares."""

        __slots__ = ()
        __hash__ = tuple.__hash__

        def __eq__(self, other):
            raise AssertionError("compared")

    index, state = PieceIndex(), Piece(is_state=True)
    index.add(state, [Key(A, (5,))])
    for first in range(10, 30):
        index.add(Piece(is_state=True), [Key(A, Part((first, 0)))])
    assert index.tail(A, (5, 6, 7), 4).piece is state


def test_a_version_is_another_one_whenever_something_changes():
    index, piece = PieceIndex(), Piece(is_state=False)
    seen = [PieceIndex().version, index.version]
    index.add(piece, [Key(A, (1, 2))])
    seen.append(index.version)
    index.touch([piece])
    assert index.page(Key(A, (1, 2))) and index.version == seen[-1]
    index.forget(piece)
    assert len({*seen, index.version}) == 4


def test_the_first_piece_is_the_one_used_longest_ago():
    index, pieces = PieceIndex(), [Piece(is_state=False) for _ in range(3)]
    for place, piece in enumerate(pieces):
        index.add(piece, [Key(A, (place,))])
    index.touch([pieces[0], Piece(is_state=False)])
    assert list(index) == [pieces[1], pieces[2], pieces[0]]
    assert pieces[1] in index and Piece(is_state=False) not in index
