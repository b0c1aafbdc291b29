"""What the device gives up goes to the host and comes back, on a device that checks every page."""

import numpy as np
import pytest
from fake_device import make_group
from loop import Loop, wander
from pairwise import crossed

from jaxspec.plan.block_plan import Block, Read, Write
from jaxspec.prefix import cache, host_tier
from jaxspec.prefix import store as prefix_store
from jaxspec.prefix import tree as prefix_tree
from jaxspec.prefix.tree import PrefixTree, chained, digest_of
from jaxspec.requests.request import Finish

PAGES = {"prefix_caching": "pages", "host_bytes": 60, "block_pages": 2}
ALL = {"prefix_caching": "all", "num_checkpoints": 2, "host_bytes": 150, "block_pages": 2}
SALTS = None, "", "a"
ROOM = {"host_bytes": 10**6}


def loop_of(mode, min_uncached=4, **sizes):
    loop = Loop(**mode | sizes)
    loop.scheduler.prefixes.min_uncached = min_uncached
    return loop


def run(loop, *group):
    loop.add(*group)
    loop.run()
    return [request.num_cached_tokens for each in group for request in each]


def check_that_nothing_is_left(loop):
    prefixes = loop.scheduler.prefixes
    assert not prefixes._arrivals._coming and not loop.mover.staged
    assert prefixes.tier.num_bytes == sum(
        30 if block.is_state else 10 for block in prefixes.tier.index
    )
    prefixes.clear()
    store, tier = prefixes.store, prefixes.tier
    assert len(store) == len(store.slots) == store.num_evictable == len(tier.index) == 0
    assert not tier.num_bytes and not store.tree._roots
    assert sorted(loop.scheduler.pages._free) == list(range(1, loop.scheduler.shapes.num_pages))
    assert len(store.slots._free) == loop.scheduler.shapes.num_checkpoints


@pytest.mark.parametrize("mode, num_drafts, page_size", crossed((PAGES, ALL), (0, 3), (1, 4, 7)))
def test_a_random_walk_in_which_both_tiers_give_up_gives_every_request_what_it_gets_alone(
    mode, num_drafts, page_size
):
    random = np.random.default_rng(num_drafts * 100 + page_size)
    longest, counts = -(-40 // page_size), np.zeros(5, int)
    for num_requests in (1, 2, 3):
        loop = loop_of(
            mode,
            num_drafts=num_drafts,
            page_size=page_size,
            chunk=int(random.choice([7, 64])),
            num_pages=1 + longest * num_requests,
            steps_per_dispatch=int(random.choice([1, 3])),
            block_pages=int(random.choice([1, 2, 5])),
        )
        wander(loop, random, 150, SALTS)
        device, tier = loop.device, loop.scheduler.prefixes.tier
        counts += [device.num_reads, device.num_writes, loop.mover.num_waits, 0, 0]
        counts += [0, 0, 0, tier.num_evicted_pieces, tier.num_hits]
        check_that_nothing_is_left(loop)
    assert min(counts) > 0, counts


def group_of(seed, root, length, max_tokens=4, **changes):
    return make_group(seed, length, max_tokens, root=root, **changes)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("mode", [PAGES, ALL], ids=["pages", "all"])
def test_a_prompt_is_found_on_the_host_up_to_its_last_token(mode, depth):
    """Where others have taken the pages that its like left, and the slots of its states."""
    loop = loop_of(mode, depth=depth, num_pages=12, **ROOM)
    run(loop, group_of(1, 22, 22))
    run(loop, group_of(2, 0, 30), group_of(3, 0, 30))
    assert not loop.scheduler.prefixes.store.tree.match(None, group_of(1, 22, 22)[0].prompt, 22)[0]
    assert run(loop, group_of(4, 22, 22)) == [20 if mode is PAGES else 21]
    assert loop.scheduler.prefixes.figures()["prefix_cache"]["host"]["num_hits"] in (20, 21)
    check_that_nothing_is_left(loop)


def test_a_state_is_found_on_the_host_where_the_device_still_has_the_pages():
    loop = loop_of(ALL, num_checkpoints=1, **ROOM)
    run(loop, group_of(1, 22, 22))
    run(loop, group_of(2, 0, 9), group_of(3, 0, 9))  # the slot is theirs now
    assert run(loop, group_of(4, 22, 22)) == [21]
    check_that_nothing_is_left(loop)


def test_what_the_host_has_is_not_read_again_and_never_changes():
    loop = loop_of(PAGES, num_pages=12, **ROOM)
    for _ in range(3):
        run(loop, group_of(1, 22, 22))
        loop.requests.clear()
        run(loop, group_of(2, 0, 30), group_of(3, 0, 30))
        loop.requests.clear()
    tier = loop.scheduler.prefixes.tier
    assert loop.device.num_writes >= 4
    keys = [key for block in tier.index for key in tier.index._keys[block]]
    assert tier.num_read_pages == len(keys) == len(set(keys))


def test_a_salt_finds_nothing_of_another_one_on_the_host():
    loop = loop_of(ALL, num_pages=12, **ROOM)
    for seed, salt in enumerate([None, "a", "b"], 1):
        assert run(loop, group_of(seed, 22, 22, salt=salt)) == [0]
    run(loop, group_of(8, 0, 30), group_of(9, 0, 30))
    cached = [run(loop, group_of(10 + i, 22, 22, salt=s)) for i, s in enumerate(["a", "c"])]
    assert cached == [[21], [0]]


def test_an_error_and_a_failed_step_empty_the_host():
    loop = loop_of(ALL, num_pages=12, **ROOM)
    for forget in (
        lambda: loop.scheduler.prefixes.ended(loop.requests[1], Finish.ERROR),
        loop.scheduler.reset,
    ):
        run(loop, group_of(1, 22, 22), group_of(2, 0, 30), group_of(3, 0, 30))
        assert len(loop.scheduler.prefixes.tier.index)
        forget()
        assert not len(loop.scheduler.prefixes.tier.index)
        loop.device.reset()
        loop.requests.clear()


# The index by itself.


def nodes_of(*texts, size=4):
    """A tree with these texts, and their nodes."""
    tree, page, found = PrefixTree(size), 0, []
    for text in texts:
        node = tree.root(None)
        for first in range(0, len(text), size):
            page += 1
            node = tree.add(node, tuple(text[first : first + size]), page)
            found.append(node)
    return tree, found


class Mover:
    seconds = 0.0

    def stage(self, blocks):
        self.staged = list(blocks)

    def num_bytes(self, *, is_state):
        return 30 if is_state else 10


def test_whole_pieces_go_first_that_were_used_longest_ago():
    tier = host_tier.HostTier(30, 4, Mover(), has_states=True)
    tree, (a, b, c, d) = nodes_of((1, 2, 3, 4, 5, 6, 7, 8), (9, 9, 9, 9), (7, 7, 7, 7))
    for nodes in ([a, b], [c], [d]):
        tier.add_pages(nodes)
    assert not tier.lacks_page(a)  # which is a use of the first piece
    tier.add_pages([tree.add(tree.root("s"), (1, 1, 1, 1), 9)])
    assert [tier.lacks_page(node) for node in (a, b, c, d)] == [False, False, True, False]
    assert (len(tier.index), tier.num_bytes, tier.num_evicted_pieces) == (3, 30, 1)


def test_a_way_ends_where_a_page_is_missing_and_at_the_last_state_before():
    tiers = [host_tier.HostTier(1000, 4, Mover(), has_states=flag) for flag in (False, True)]
    tree, (a, b, c, tail) = nodes_of(tuple(range(14)))
    texts = list(range(20))

    def find(*nodes, has_states=True, limit=19):
        match = prefix_tree.PrefixMatch(list(nodes), None)
        return tiers[has_states].find(match, tree.root(None), texts, limit)

    assert find() == (0, (), (), None, 0)
    tier = tiers[True]
    read = tier.add_pages([c, a])
    assert read == Read(read.block, (c.page, a.page))
    tiers[False].add_pages([c, a])
    assert (
        find().num_tokens == 0
        and find().num_matched == 4
        and find(has_states=False).num_tokens == 4
    )
    assert find(a, b, has_states=False).pages[0].place == 0
    state = tier.add_state(tail, 7)
    assert state == Read(state.block, (tail.page,), 7)
    assert not find().num_tokens  # the second page is nowhere
    way = find(a, b)
    assert way.num_tokens == 14 and way.state.block is state.block and way.nodes == [a, b]
    assert way.blocks == [state.block, read.block]
    assert not find(a, b, limit=13).num_tokens and find(a, b).num_matched == 12
    whole = tier.add_state(b, 3)
    assert whole.pages == () and find(a, b, limit=13).num_tokens == 8
    assert find(a, b, limit=13).pages == ()


def test_a_piece_that_requests_share_comes_once():
    tier = host_tier.HostTier(1000, 4, Mover(), has_states=False)
    one, other, third = (Block(is_state=False) for _ in range(3))
    tier.stage([one, other], [other, third, one])
    assert tier.mover.staged == [one, other, third]


def test_a_tier_that_is_closed_gives_its_memory_back():
    tier = host_tier.HostTier(1000, 4, Mover(), has_states=False)
    tier.add_pages(nodes_of(tuple(range(8)))[1])
    tier.close()
    assert (len(tier.index), tier.num_bytes) == (0, 0)


def test_a_digest_is_of_a_text_and_its_salt_and_the_same_in_every_process():
    tree, nodes = nodes_of((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4))
    assert digest_of(nodes[1]) == chained(digest_of(nodes[0]), (5, 6, 7, 8))
    roots = [tree.root(salt) for salt in (None, "", "None", "a", "\udcff", "é", 1)]
    assert len({digest_of(root) for root in roots}) == len(roots)
    assert digest_of(nodes[1]).hex()[:16] == "e8705cce6d744385"


# Bugs, planted in the books.


REAL_TAKE = prefix_store.PrefixStore.take_copies
REAL_BRING = cache._bring_state


def read_after_the_page_was_used_again(store):
    """By the next plan."""
    now = REAL_TAKE(store)
    late, store.late = getattr(store, "late", []), [x for x in now if isinstance(x, Read)]
    return late + [each for each in now if not isinstance(each, Read)]


def the_checkpoint_of_the_neighbour(store):
    count = store._shapes.num_checkpoints
    return [
        each._replace(checkpoint=each.checkpoint % count + 1)
        if isinstance(each, Read) and each.checkpoint
        else each
        for each in REAL_TAKE(store)
    ]


def pages_in_the_wrong_order(store):
    return [
        each._replace(pages=each.pages[::-1]) if isinstance(each, Write) else each
        for each in REAL_TAKE(store)
    ]


def written_before_it_is_read(store):
    return sorted(REAL_TAKE(store), key=lambda each: not isinstance(each, Write))


def no_salt_in_digests(node):
    while node.parent is not None:
        node = node.parent
    node.digest = b""
    return b""


def pages_without_their_state(store, state, node, tail):
    REAL_BRING(store, state, node, tail)
    store.copies.pop()


BUGS = {
    "read after the page was used again": (
        prefix_store.PrefixStore, "take_copies", read_after_the_page_was_used_again,
    ),
    "the checkpoint of the neighbour": (
        prefix_store.PrefixStore, "take_copies", the_checkpoint_of_the_neighbour,
    ),
    "pages in the wrong order": (
        prefix_store.PrefixStore, "take_copies", pages_in_the_wrong_order,
    ),
    "written before it is read": (
        prefix_store.PrefixStore, "take_copies", written_before_it_is_read,
    ),
    "no salt in digests": (prefix_tree, "digest_of", no_salt_in_digests),
    "pages without their state": (
        cache, "_bring_state", pages_without_their_state,
    ),
}  # fmt: skip


def in_and_out_of_the_host(mode):
    loop = loop_of(mode, depth=2, num_drafts=3, num_pages=18, **ROOM)
    for turn in range(3):
        for number, salt in enumerate([None, "a", None]):
            loop.add(group_of(1 + 10 * turn + 2 * number, 13 + 4 * number, 20, salt=salt))
            loop.add(group_of(2 + 10 * turn + 2 * number, 12, 18, salt=salt, max_tokens=9))
            loop.run()
        run(loop, group_of(7 + 10 * turn, 0, 30), group_of(8 + 10 * turn, 0, 30))
    assert loop.device.num_writes > 3


@pytest.mark.parametrize("mode", [PAGES, ALL], ids=["pages", "all"])
def test_the_sound_books_pass_where_the_bugs_are_seen(mode):
    in_and_out_of_the_host(mode)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, monkeypatch):
    where, name, planted = BUGS[bug]
    monkeypatch.setattr(where, name, planted)
    if name == "digest_of":
        monkeypatch.setattr(host_tier, name, planted)
    with pytest.raises((AssertionError, TypeError)):
        for mode in (PAGES, ALL):
            in_and_out_of_the_host(mode)
