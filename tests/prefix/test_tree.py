"""The tree of pages by itself: what it finds, what it keeps and what goes first."""

import itertools

import numpy as np
import pytest

from jaxspec.prefix.tree import PrefixTree


def with_text(tree, tokens, salt=None, first_page=1):
    """Pages of a text, one after the other from `first_page` on; the last node."""
    node, size = tree.root(salt), tree.page_size
    for index, start in enumerate(range(0, len(tokens), size)):
        node = tree.add(node, tokens[start : start + size], first_page + index)
    return node


def found(tree, tokens, salt=None, limit=None):
    return [n.page for n in tree.match(salt, tokens, len(tokens) if limit is None else limit).nodes]


def test_a_text_is_found_page_by_page_as_far_as_it_goes():
    tree = PrefixTree(4)
    assert found(tree, [1, 2, 3, 4]) == []
    with_text(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [1, 2]
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 9]) == [1]
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 8], limit=7) == [1]
    assert found(tree, [5, 6, 7, 8]) == [] and len(tree) == 2


def test_a_request_begins_behind_pages_or_where_it_needs_a_state_behind_one():
    tree, text = PrefixTree(4), list(range(10))
    for has_states in (False, True):
        assert tree.match(None, text, 10).start(4, has_states=has_states) == (0, None)
    node = with_text(tree, text[:8])
    match = tree.match(None, text, 10)
    assert match.start(4, has_states=False) == (8, node)
    assert match.start(4, has_states=True) == (0, None)
    tail = tree.add(node.parent, [4, 5], 7)
    tree.set_checkpoint(tail, 2)
    assert tree.match(None, text, 10).start(4, has_states=True) == (6, tail)


def test_equal_tokens_behind_others_are_another_text():
    tree = PrefixTree(2)
    with_text(tree, [1, 2, 7, 7])
    with_text(tree, [3, 4, 7, 7], first_page=10)
    assert found(tree, [1, 2, 7, 7]) == [1, 2] and found(tree, [3, 4, 7, 7]) == [10, 11]


@pytest.mark.parametrize("salt", ["", "a", "\ud800", "None"])
def test_salts_share_nothing(salt):
    tree = PrefixTree(2)
    with_text(tree, [1, 2])
    assert found(tree, [1, 2], salt) == []
    with_text(tree, [1, 2], salt, first_page=5)
    assert found(tree, [1, 2], salt) == [5] and found(tree, [1, 2]) == [1]


def test_a_page_that_is_there_stays():
    tree = PrefixTree(2)
    node = with_text(tree, [1, 2])
    assert with_text(tree, [1, 2], first_page=9) is node and not tree.holds(9)


def test_the_deepest_checkpoint_on_the_way_or_beside_it_is_found():
    tree = PrefixTree(4)
    text = list(range(10))
    node = with_text(tree, text[:8])
    assert tree.match(None, text, 10).at_checkpoint is None
    tree.set_checkpoint(node.parent, 1)
    tail = tree.add(node.parent, [4, 5], 7)
    tree.set_checkpoint(tail, 2)
    assert tree.match(None, text, 10).at_checkpoint is tail
    assert tree.match(None, [*text[:5], 99], 6).at_checkpoint is node.parent
    assert tree.match(None, text, 5).at_checkpoint is node.parent  # no more than that counts
    tree.set_checkpoint(node, 3)
    assert tree.match(None, text, 10).at_checkpoint is node


def test_leaves_that_nobody_holds_go_first_and_the_oldest_among_them():
    tree = PrefixTree(1)
    with_text(tree, [1, 2, 3])
    with_text(tree, [1, 5], first_page=10)  # page 1 serves both
    for page in (1, 2, 3, 11):
        tree.unpin(page)
    order = []
    while tree.num_evictable:
        order += [node.page for node in tree.remove(tree.oldest())]
        assert len(tree) == 4 - len(order)
    assert order == [3, 2, 11, 1]
    assert found(tree, [1]) == []


def test_whoever_is_used_again_goes_later():
    tree = PrefixTree(1)
    first = with_text(tree, [1])
    with_text(tree, [2], first_page=2)
    tree.unpin(1)
    tree.unpin(2)
    tree.touch(first)
    assert tree.oldest().page == 2
    tree.pin(2)
    assert tree.num_evictable == 1 and tree.oldest().page == 1


def test_a_page_that_nobody_holds_may_go_though_one_behind_it_is_held():
    """A request that has the page's tokens in one of its own keeps what it has."""
    tree = PrefixTree(1)
    with_text(tree, [1, 2])
    tree.unpin(1)
    assert tree.num_evictable == 1
    assert {node.page for node in tree.remove(tree.oldest())} == {1, 2}
    assert tree.num_evictable == 0 and not tree.holds(2)


def test_clear_gives_back_every_page_and_kills_every_node():
    tree = PrefixTree(2)
    node = with_text(tree, [1, 2, 3, 4])
    tree.unpin(2)
    root = tree.root(None)
    assert sorted(tree.clear()) == [1, 2] and tree.num_evictable == len(tree) == 0
    assert not (node.is_alive or root.is_alive) and tree.root(None).is_alive


def test_a_salt_whose_texts_are_gone_is_forgotten():
    tree = PrefixTree(2)
    for number in range(5):
        tree.remove(with_text(tree, [1, 2], salt=str(number)))
    assert not tree._roots


def test_a_salt_that_never_had_a_text_can_be_forgotten():
    tree = PrefixTree(2)
    root = tree.root("a")
    tree.prune("a")
    tree.prune("b")
    assert not tree._roots and not root.is_alive
    with_text(tree, [1, 2], "a")
    tree.prune("a")
    assert found(tree, [1, 2], "a") == [1]


def test_what_is_out_of_date_does_not_pile_up():
    tree = PrefixTree(1)
    with_text(tree, [1, 2, 3])
    for _ in range(1000):
        tree.unpin(3)
        tree.pin(3)
    assert len(tree._leaves) < 100
    tree.unpin(3)
    assert tree.oldest().page == 3


def test_counts_add_up_over_random_lives():
    random, tree, held = np.random.default_rng(0), PrefixTree(2), set()
    page = 0
    for _ in range(2000):
        if random.random() < 0.4:
            parents = [tree.root(None), *tree._by_page.values()]
            parent = parents[random.integers(len(parents))]
            page += 1
            if tree.add(parent, random.integers(0, 3, 2).tolist(), page).page == page:
                held.add(page)
        elif held and random.random() < 0.6:
            gone = held.pop()
            if tree.holds(gone):
                tree.unpin(gone)
        elif tree.num_evictable:
            tree.remove(tree.oldest())
        free = [node for node in tree._by_page.values() if not node.is_held]
        assert tree.num_evictable == len(free)
        assert all(node.is_alive and node.parent.is_alive for node in tree._by_page.values())


def test_a_leaf_that_a_request_holds_again_stays():
    tree = PrefixTree(2)
    with_text(tree, [1, 2])
    other = with_text(tree, [3, 4], first_page=2)
    tree.unpin(1)
    tree.unpin(2)
    tree.pin(1)
    assert tree.oldest() is other


def test_the_version_changes_with_every_match():
    """Lookups of waiting requests are repeated only then."""
    tree, text = PrefixTree(2), [1, 2, 3]

    def look():
        nodes, state = tree.match(None, text, 3)
        return [node.page for node in nodes], state and state.checkpoint

    seen = [(tree.version, look())]
    node = with_text(tree, text[:2])
    for change in (
        lambda: None,
        lambda: tree.set_checkpoint(node, 1),
        lambda: tree.set_checkpoint(tree.add(node, [3], 2), 2),
        lambda: tree.remove(node.tails[3,]),
        lambda: tree.set_checkpoint(node, 0),
        lambda: tree.remove(node),
    ):
        change()
        seen.append((tree.version, look()))
    pairs = list(itertools.pairwise(seen))
    assert all(before[1] != after[1] for before, after in pairs)
    assert all(before[0] != after[0] for before, after in pairs)
