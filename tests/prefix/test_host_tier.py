"""What the device gives up goes to the host and comes back, on a device that checks every page."""

import numpy as np
import pytest
from fake_device import make_buckets
from loop import Loop, group_of, run, wander
from pairwise import crossed

from jaxspec.plan.block_plan import Block, Read, Write
from jaxspec.prefix import host_tier
from jaxspec.prefix import store as prefix_store
from jaxspec.prefix import tree as prefix_tree
from jaxspec.prefix.block_index import BlockIndex
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


def check_that_nothing_is_left(loop):
    prefixes = loop.scheduler.prefixes
    assert not prefixes._arrivals._coming and not loop.mover.staged
    assert prefixes.tier.index.num_bytes == sum(
        30 if block.is_state else 10 for block in prefixes.tier.index.blocks
    )
    prefixes.clear()
    store, tier = prefixes.store, prefixes.tier
    assert (
        len(store.tree)
        == len(store.states)
        == store.pool.num_evictable
        == len(tier.index.blocks)
        == 0
    )
    assert not tier.index.num_bytes and not store.tree._roots
    assert sorted(loop.scheduler.pages._free) == list(range(1, loop.scheduler.shapes.num_pages))
    assert len(store.free_slots) == loop.scheduler.shapes.num_checkpoints


@pytest.mark.few(1)
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


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("mode", [PAGES, ALL], ids=["pages", "all"])
def test_a_prompt_is_found_on_the_host_up_to_its_last_token(mode, depth):
    """Where others have taken the pages that its like left, and the slots of its states."""
    loop = loop_of(mode, depth=depth, num_pages=12, **ROOM)
    run(loop, group_of(1, 22, 22))
    run(loop, group_of(2, 0, 30), group_of(3, 0, 30))
    assert not loop.scheduler.prefixes.store.tree.match(None, group_of(1, 22, 22)[0].prompt, 22)[0]
    assert run(loop, group_of(4, 22, 22)) == [20 if mode is PAGES else 21]
    assert loop.scheduler.prefixes.stats()["prefix_cache"]["host"]["num_hits"] in (20, 21)
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
    keys = [key for block in tier.index.blocks for key in block.keys]
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
        assert len(loop.scheduler.prefixes.tier.index.blocks)
        forget()
        assert not len(loop.scheduler.prefixes.tier.index.blocks)
        loop.device.reset()
        loop.requests.clear()


# Requests that wait for what the host has, and what becomes of them.


def check_that_nothing_comes(loop):
    assert not loop.scheduler.prefixes._arrivals._coming and not loop.mover.staged


def test_a_request_waits_for_its_pieces_only_while_others_run():
    loop = loop_of(PAGES | ROOM, num_pages=24)
    loop.mover.has_landed = lambda block: False
    run(loop, group_of(1, 22, 22))
    run(loop, group_of(2, 0, 30), group_of(3, 0, 30), group_of(4, 0, 30))
    (busy,), (waits,), (other,) = group_of(5, 0, 3, 12), group_of(6, 22, 22), group_of(7, 0, 3)
    loop.add([busy])
    loop.turn()
    loop.add([waits], [other])
    loop.turn()
    assert waits in loop.scheduler.waiting and other in loop.scheduler.running
    assert loop.mover.staged
    loop.run()
    assert waits.num_cached_tokens == 20  # it entered once the others had ended
    check_that_nothing_comes(loop)


def test_what_goes_while_a_request_waits_for_it_is_right_anyway():
    """A piece that the host forgets meanwhile comes all the same; after a reset nothing does."""
    for way in ("forgotten", "reset", "abort"):
        loop = loop_of(ALL | ROOM, num_pages=24)
        has_landed, loop.mover.has_landed = loop.mover.has_landed, lambda block: False
        run(loop, group_of(1, 22, 22))
        run(loop, group_of(2, 0, 30), group_of(3, 0, 30), group_of(4, 0, 30))
        (busy,), (waits,) = group_of(5, 0, 3, 12), group_of(6, 22, 22)
        loop.add([busy], [waits])
        for _ in range(2):
            loop.turn()
        assert waits in loop.scheduler.waiting
        prefixes = loop.scheduler.prefixes
        if way == "forgotten":
            prefixes.tier.max_bytes = 0
            prefixes.tier._add([])
        elif way == "reset":
            prefixes.clear()
        else:
            loop.scheduler.end(waits, Finish.ABORT)
        assert way == "forgotten" or not loop.mover.staged
        loop.mover.has_landed = has_landed
        loop.run()
        assert waits.num_cached_tokens == 0
        check_that_nothing_comes(loop)


class SlowDisk:
    """It takes whatever leaves the host's memory, and never gives it back."""

    def __init__(self):
        self.index, self.num_waits = BlockIndex(), 0

    def poll(self):
        pass

    forget_unfilled = clear = poll

    def put(self, block):
        self.index.add(block.without_arrays(), 0)

    def want(self, blocks, ahead):
        pass

    def is_loading(self, block):
        return block in self.index.blocks

    def wait(self, blocks, seconds):
        self.num_waits += 1
        return False


def test_a_request_goes_without_what_a_disk_does_not_give():
    loop = loop_of(PAGES | ROOM, num_pages=24, host_bytes=20)
    disk = loop.scheduler.prefixes.tier.disk = SlowDisk()
    run(loop, group_of(1, 22, 22))
    run(loop, group_of(2, 0, 30), group_of(3, 0, 30), group_of(4, 0, 30))
    assert disk.index.blocks
    (late,) = group_of(5, 22, 22)
    run(loop, [late])
    assert disk.num_waits > 0 and late.num_cached_tokens == 0
    check_that_nothing_comes(loop)


def waiting_loop(*changes):
    """A loop in which requests wait for what the host has, one for each of `changes`."""
    loop = loop_of(PAGES | ROOM, num_pages=40)
    loop.mover.has_landed = lambda block: False
    for number, each in enumerate(changes):
        run(loop, group_of(1 + number, 22, 22, salt=each.get("salt")))
    run(loop, *[group_of(10 + number, 0, 30) for number in range(5)])
    loop.add(group_of(20, 0, 3, 12))
    loop.turn()
    waiting = []
    for number, each in enumerate(changes):
        (request,) = group_of(30 + number, 22, 22, salt=each.get("salt"))
        request.priority = each.get("priority", 0)
        waiting.append(request)
        loop.add([request])
    return loop, waiting


def test_what_a_request_waits_for_is_looked_up_once_while_nothing_changes(monkeypatch):
    loop, (waits,) = waiting_loop({})
    prefixes, looks = loop.scheduler.prefixes, []
    real_match, real_find = PrefixTree.match, host_tier.HostTier.find
    monkeypatch.setattr(PrefixTree, "match", lambda *x: looks.append("tree") or real_match(*x))
    monkeypatch.setattr(
        host_tier.HostTier, "find", lambda *x: looks.append("host") or real_find(*x)
    )
    for _ in range(3):
        assert prefixes.is_coming(waits, 6, can_wait=True)
        assert prefixes.find(waits).num_cached == 0
    assert looks == ["tree", "host"]
    prefixes.tier._add([])
    assert prefixes.is_coming(waits, 6, can_wait=True) and looks == ["tree", "host", "host"]
    prefixes.store.tree.set_checkpoint(prefixes.store.tree.root("another"), 0)
    assert prefixes.is_coming(waits, 6, can_wait=True) and looks[3:] == ["tree", "host"]
    loop.run()


def test_what_the_most_urgent_request_needs_comes_first():
    loop, (late, urgent) = waiting_loop({"salt": "a", "priority": 1}, {"salt": "b"})
    prefixes, staged = loop.scheduler.prefixes, []
    for request in (late, urgent):
        assert prefixes.is_coming(request, 6, can_wait=True)
    prefixes.tier.stage = lambda first, ahead: staged.append((first, ahead))
    prefixes._arrivals._stage()
    coming = prefixes._arrivals._coming
    assert staged == [(coming[urgent].host.blocks, coming[late].host.blocks)]
    del prefixes.tier.stage
    loop.run()
    assert late.num_cached_tokens == urgent.num_cached_tokens == 20
    check_that_nothing_comes(loop)


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


def tier_of(num_checkpoints, host_bytes=1000):
    shapes = make_buckets(num_checkpoints=num_checkpoints, block_pages=2)
    return host_tier.HostTier(shapes, host_bytes, Mover())


def add_pages(tier, nodes):
    (read,) = tier.save_pages(nodes)
    return read


def test_whole_pieces_go_first_that_were_used_longest_ago():
    tier = tier_of(2, host_bytes=30)
    tree, (a, b, c, d) = nodes_of((1, 2, 3, 4, 5, 6, 7, 8), (9, 9, 9, 9), (7, 7, 7, 7))
    for nodes in ([a, b], [c], [d]):
        add_pages(tier, nodes)
    assert not tier.save_pages([a])  # which is a use of the first piece
    add_pages(tier, [tree.add(tree.root("s"), (1, 1, 1, 1), 9)])
    assert [tier._lacks(node) for node in (a, b, c, d)] == [False, False, True, False]
    assert (len(tier.index.blocks), tier.index.num_bytes, tier.num_evicted_pieces) == (3, 30, 1)


def test_a_way_ends_where_a_page_is_missing_and_at_the_last_state_before():
    tiers = [tier_of(0), tier_of(2)]
    tree, (a, b, c, tail) = nodes_of(tuple(range(14)))
    texts = list(range(20))

    def find(*nodes, has_states=True, limit=19):
        match = prefix_tree.PrefixMatch(list(nodes), None)
        return tiers[has_states].find(match, tree.root(None), texts, limit)

    assert find() == (0, (), (), None, 0)
    tier = tiers[True]
    read = add_pages(tier, [c, a])
    assert read == Read(read.block, (c.page, a.page))
    add_pages(tiers[False], [c, a])
    assert (
        find().num_tokens == 0
        and find().num_matched == 4
        and find(has_states=False).num_tokens == 4
    )
    assert find(a, b, has_states=False).pages[0].place == 0
    tree.set_checkpoint(tail, 7)
    (state,) = tier.save_state(tail)
    assert state == Read(state.block, (tail.page,), 7) and not tier.save_state(tail)
    assert not find().num_tokens  # the second page is nowhere
    way = find(a, b)
    assert way.num_tokens == 14 and way.state.block is state.block and way.nodes == [a, b]
    assert way.blocks == [state.block, read.block]
    assert not find(a, b, limit=13).num_tokens and find(a, b).num_matched == 12
    (whole,) = tier.save_state(b)
    assert whole.pages == () and find(a, b, limit=13).num_tokens == 8
    assert find(a, b, limit=13).pages == ()


def test_a_piece_that_requests_share_comes_once():
    tier = tier_of(0)
    one, other, third = (Block(is_state=False) for _ in range(3))
    tier.stage([one, other], [other, third, one])
    assert tier.mover.staged == [one, other, third]


def test_a_tier_that_is_closed_gives_its_memory_back():
    tier = tier_of(0)
    add_pages(tier, nodes_of(tuple(range(8)))[1])
    tier.close()
    assert (len(tier.index.blocks), tier.index.num_bytes) == (0, 0)


def test_a_digest_is_of_a_text_and_its_salt_and_the_same_in_every_process():
    tree, nodes = nodes_of((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4))
    assert digest_of(nodes[1]) == chained(digest_of(nodes[0]), (5, 6, 7, 8))
    roots = [tree.root(salt) for salt in (None, "", "None", "a", "\udcff", "é", 1)]
    assert len({digest_of(root) for root in roots}) == len(roots)
    assert digest_of(nodes[1]).hex()[:16] == "e8705cce6d744385"


# Bugs, planted in the books.


REAL_TAKE = prefix_store.PrefixStore.take_copies
REAL_RESTORE = prefix_store.PrefixStore._restore_state


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
    REAL_RESTORE(store, state, node, tail)
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
        prefix_store.PrefixStore, "_restore_state", pages_without_their_state,
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
