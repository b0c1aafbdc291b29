import numpy as np
import pytest

from jaxspec.piece_plan import Piece, Read, Write, pack_piece, piece_layout


def unpacked(copy, num_pages):
    fields = piece_layout(num_pages).unpack(pack_piece(copy, num_pages))
    return {name: value.tolist() for name, value in fields.items()}


def test_a_plan_names_the_piece_its_pages_and_its_state():
    piece = Piece(is_state=True)
    assert unpacked(Read(piece, (7, 5), 3), 4) == {
        "piece": piece.number,
        "checkpoint": 3,
        "sources": [7, 5, 0, 0],
        "targets": [0, 0, 0, 0],
    }
    assert unpacked(Write(piece, (1, 0), (9, 8)), 2) == {
        "piece": piece.number,
        "checkpoint": 0,
        "sources": [1, 0],
        "targets": [9, 8],
    }


def test_no_two_pieces_have_one_number():
    numbers = [Piece(is_state=False).number for _ in range(5)]
    assert len(set(numbers)) == 5 and min(numbers) > 0
    assert pack_piece(Read(Piece(is_state=False), ()), 1).dtype == np.int32


def test_more_pages_than_a_piece_has_room_for_are_refused():
    with pytest.raises(ValueError, match="room for 2 pages, 3 came"):
        pack_piece(Read(Piece(is_state=False), (1, 2, 3)), 2)
