import numpy as np
import pytest

from jaxspec.plan.block_plan import Block, Read, Write, block_layout, pack_block


def unpacked(copy, num_pages):
    fields = block_layout(num_pages).unpack(pack_block(copy, num_pages))
    return {name: value.tolist() for name, value in fields.items()}


def test_a_plan_names_the_piece_its_pages_and_its_state():
    block = Block(is_state=True)
    assert unpacked(Read(block, (7, 5), 3), 4) == {
        "block": block.number,
        "checkpoint": 3,
        "sources": [7, 5, 0, 0],
        "targets": [0, 0, 0, 0],
    }
    assert unpacked(Write(block, (1, 0), (9, 8)), 2) == {
        "block": block.number,
        "checkpoint": 0,
        "sources": [1, 0],
        "targets": [9, 8],
    }


def test_no_two_pieces_have_one_number():
    numbers = [Block(is_state=False).number for _ in range(5)]
    assert len(set(numbers)) == 5 and min(numbers) > 0
    assert pack_block(Read(Block(is_state=False), ()), 1).dtype == np.int32


def test_more_pages_than_a_piece_has_room_for_are_refused():
    with pytest.raises(ValueError, match="room for 2 pages, 3 came"):
        pack_block(Read(Block(is_state=False), (1, 2, 3)), 2)
