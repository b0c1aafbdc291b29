from jaxspec.plan.block_plan import Block, Key
from jaxspec.prefix.block_index import BlockIndex, BlockRef

A, B = b"text before", b"another one"


def page(index, key):
    return index.find(key, is_state=False)


def state(index, key):
    return index.find(key, is_state=True)


def add(index, *keys, is_state=False):
    block = Block(is_state=is_state, keys=keys)
    index.add(block, 10)
    return block


def test_pages_and_states_are_found_by_the_text_before_them_and_their_own():
    index = BlockIndex()
    pages = add(index, Key(A, (1, 2)), Key(B, (1, 2)))
    whole = add(index, Key(A, (1, 2)), is_state=True)
    assert page(index, Key(B, (1, 2))) == BlockRef((1, 2), pages, 1)
    assert state(index, Key(A, (1, 2))) == BlockRef((1, 2), whole)
    assert state(index, Key(B, (1, 2))) is page(index, Key(A, (1, 3))) is None
    assert index.num_bytes == 20
    index.remove(pages)
    assert page(index, Key(A, (1, 2))) is None and state(index, Key(A, (1, 2))) is not None
    index.remove(whole)
    assert index.num_bytes == len(index.blocks) == 0 and not index._refs and not index._lengths


def test_what_a_newer_piece_has_stays_when_the_older_one_goes():
    index = BlockIndex()
    old, new = add(index, Key(A, (1, 2)), Key(A, (3, 4))), add(index, Key(A, (1, 2)))
    index.remove(old)
    assert page(index, Key(A, (1, 2))).block is new and page(index, Key(A, (3, 4))) is None


def test_the_longest_part_of_a_page_counts():
    index = BlockIndex()
    parts = (5,), (5, 6), (7, 8, 9)
    blocks = [add(index, Key(A, tokens), is_state=True) for tokens in parts]
    assert index.tail(A, (5, 6, 7), 4).block is blocks[1]
    assert index.tail(A, (5,), 4).block is blocks[0]
    assert index.tail(A, (7, 8), 4) is index.tail(B, (5, 6), 4) is None
    assert index.tail(A, (7, 8, 9), 3) is None  # a whole page is none
    index.remove(blocks[1])
    assert index.tail(A, (5, 6, 7), 4).block is blocks[0]


def test_a_tail_is_looked_up_and_no_sibling_is_walked():
    class Part(tuple):
        """A part of a page, which nobody compares."""

        __slots__ = ()
        __hash__ = tuple.__hash__

        def __eq__(self, other):
            raise AssertionError("compared")

    index = BlockIndex()
    found = add(index, Key(A, (5,)), is_state=True)
    for first in range(10, 30):
        add(index, Key(A, Part((first, 0))), is_state=True)
    assert index.tail(A, (5, 6, 7), 4).block is found


def test_a_version_is_another_one_whenever_something_changes():
    index = BlockIndex()
    seen = [BlockIndex().version, index.version]
    block = add(index, Key(A, (1, 2)))
    seen.append(index.version)
    index.touch([block])
    assert page(index, Key(A, (1, 2))) and index.version == seen[-1]
    index.remove(block)
    assert len({*seen, index.version}) == 4


def test_the_first_piece_is_the_one_used_longest_ago():
    index = BlockIndex()
    blocks = [add(index, Key(A, (place,))) for place in range(3)]
    index.touch([blocks[0], Block(is_state=False)])
    assert list(index.blocks) == [blocks[1], blocks[2], blocks[0]]
