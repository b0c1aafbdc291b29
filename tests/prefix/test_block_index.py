from jaxspec.plan.block_plan import Block
from jaxspec.prefix.block_index import BlockIndex, BlockRef, Key

A, B = b"text before", b"another one"


def test_pages_and_states_are_found_by_the_text_before_them_and_their_own():
    index, pages, state = BlockIndex(), Block(is_state=False), Block(is_state=True)
    index.add(pages, [Key(A, (1, 2)), Key(B, (1, 2))])
    index.add(state, [Key(A, (1, 2))])
    assert index.page(Key(B, (1, 2))) == BlockRef((1, 2), pages, 1)
    assert index.state(Key(A, (1, 2))) == BlockRef((1, 2), state)
    assert index.state(Key(B, (1, 2))) is index.page(Key(A, (1, 3))) is None
    assert index.forget(pages) == (Key(A, (1, 2)), Key(B, (1, 2)))
    assert index.page(Key(A, (1, 2))) is None and index.state(Key(A, (1, 2))) is not None
    index.forget(state)
    assert len(index) == 0 and not index._below and not index._lengths


def test_what_a_newer_piece_has_stays_when_the_older_one_goes():
    index, old, new = BlockIndex(), Block(is_state=False), Block(is_state=False)
    index.add(old, [Key(A, (1, 2)), Key(A, (3, 4))])
    index.add(new, [Key(A, (1, 2))])
    index.forget(old)
    assert index.page(Key(A, (1, 2))).block is new and index.page(Key(A, (3, 4))) is None


def test_the_longest_part_of_a_page_counts():
    index, blocks = BlockIndex(), [Block(is_state=True) for _ in range(3)]
    for block, tokens in zip(blocks, [(5,), (5, 6), (7, 8, 9)], strict=True):
        index.add(block, [Key(A, tokens)])
    assert index.tail(A, (5, 6, 7), 4).block is blocks[1]
    assert index.tail(A, (5,), 4).block is blocks[0]
    assert index.tail(A, (7, 8), 4) is index.tail(B, (5, 6), 4) is None
    assert index.tail(A, (7, 8, 9), 3) is None  # a whole page is none
    index.forget(blocks[1])
    assert index.tail(A, (5, 6, 7), 4).block is blocks[0]


def test_a_tail_is_looked_up_and_no_sibling_is_walked():
    class Part(tuple):
        """A part of a page, which nobody compares."""

        __slots__ = ()
        __hash__ = tuple.__hash__

        def __eq__(self, other):
            raise AssertionError("compared")

    index, state = BlockIndex(), Block(is_state=True)
    index.add(state, [Key(A, (5,))])
    for first in range(10, 30):
        index.add(Block(is_state=True), [Key(A, Part((first, 0)))])
    assert index.tail(A, (5, 6, 7), 4).block is state


def test_a_version_is_another_one_whenever_something_changes():
    index, block = BlockIndex(), Block(is_state=False)
    seen = [BlockIndex().version, index.version]
    index.add(block, [Key(A, (1, 2))])
    seen.append(index.version)
    index.touch([block])
    assert index.page(Key(A, (1, 2))) and index.version == seen[-1]
    index.forget(block)
    assert len({*seen, index.version}) == 4


def test_the_first_piece_is_the_one_used_longest_ago():
    index, blocks = BlockIndex(), [Block(is_state=False) for _ in range(3)]
    for place, block in enumerate(blocks):
        index.add(block, [Key(A, (place,))])
    index.touch([blocks[0], Block(is_state=False)])
    assert list(index) == [blocks[1], blocks[2], blocks[0]]
    assert blocks[1] in index and Block(is_state=False) not in index
