"""The store by itself: names that hold from the next plan on. Whole lives: test_prefix_cache."""

from fake_device import make_buckets, make_group

from jaxspec.plan.plan import SlotCopy, StateExport
from jaxspec.prefix.store import PrefixMetrics, PrefixStore


def make(num_checkpoints=2, **sizes):
    shapes = make_buckets(num_checkpoints=num_checkpoints, **sizes)
    return PrefixStore(shapes, PrefixMetrics())


def running(store, num_tokens=10, seed=1, row=3, salt=None):
    (request,) = make_group(seed, num_tokens, 4, salt=salt)
    request.pages = store.pool.allocate(-(-num_tokens // 4))
    request.row = row
    return request


def publish(store, request, length):
    return store.publish(request, store.tree.root(None), length)


def leave(store, request):
    store.pool.release(request.pages)
    request.pages = []


def test_full_pages_are_published_and_stay_when_their_request_leaves():
    store = make()
    request = running(store)
    node = publish(store, request, 9)
    assert node.depth == 2 and len(store.tree) == 2 and store.pool.num_evictable == 0
    num_free = store.pool.num_free
    leave(store, request)
    assert store.pool.num_evictable == 2 and store.pool.num_free == num_free + 3


def test_a_partly_filled_page_is_copied_unless_its_request_leaves():
    store = make()
    request = running(store)
    node = publish(store, request, 10)
    third = request.pages[2]
    store.keep(request, node, 9)
    (copied,) = store.take_copies()
    assert copied == StateExport(3, 1, third, copied.target_page) and copied.target_page != third
    assert node.tails[tuple(request.tokens[8:9])].page == copied.target_page
    store.keep(request, node, 10, gives_page=True)
    assert store.take_copies() == [StateExport(3, 2)]
    leave(store, request)
    assert store.tree.holds(third) and store.pool.num_evictable == 4


def test_what_is_there_is_not_kept_again():
    store = make()
    request = running(store)
    node = publish(store, request, 8)
    for _ in range(2):
        store.keep(request, node, 8)
    assert len(store.take_copies()) == 1 and store._metrics.num_checkpoints == 1


def test_the_state_used_longest_ago_makes_room_and_takes_its_own_page_along():
    store = make(num_checkpoints=1)
    first, second = running(store, 9), running(store, 10, seed=2)
    store.keep(first, publish(store, first, 9), 9, gives_page=True)
    leave(store, first)
    num_pages = len(store.tree)
    store.keep(second, publish(store, second, 8), 8)
    assert [each.checkpoint for each in store.take_copies()] == [1, 1]
    assert len(store.tree) == num_pages - 1 + 2 and store._metrics.num_evicted_checkpoints == 1


def test_a_state_that_was_used_since_outlives_a_newer_one():
    store = make()
    requests = [running(store, 8, seed) for seed in (1, 2, 3)]
    nodes = [publish(store, request, 8) for request in requests]
    for request, node in zip(requests[:2], nodes, strict=False):
        store.keep(request, node, 8)
    store.touch(nodes[0])
    store.keep(requests[2], nodes[2], 8)
    assert [node.checkpoint for node in nodes] == [1, 0, 2] and not store.free_slots


def test_without_slots_no_state_is_kept():
    store = make(num_checkpoints=0)
    request = running(store)
    store.keep(request, publish(store, request, 8), 8)
    assert store.take_copies() == [] and store._metrics.skipped["no slot"] == 1


def test_what_would_come_too_late_is_not_kept():
    store = make()
    request = running(store)
    node = publish(store, request, 8)
    store.copies.append(SlotCopy(1, 2, 0, 0, (1,)))
    store.keep(request, node, 8)
    assert len(store.take_copies()) == 1 and store._metrics.skipped["too late"] == 1
    store.keep(request, node, 8)
    assert len(store.take_copies()) == 1


def test_a_row_in_flight_is_kept_where_it_turns_out_to_stand():
    store = make()
    request = running(store, 10)
    request.pages += store.pool.allocate(1)
    node = publish(store, request, 9)
    store.keep_unsettled(request, node)
    leave(store, request)
    assert store.take_copies() == [StateExport(3, 1)] and store.pool.num_evictable == 4
    request.tokens += [1, 2, 3, 4]
    store.settle(request)
    hit = store.tree.match(None, request.tokens, 13)
    assert len(hit.nodes) == 3 and hit.at_checkpoint.tokens == (request.tokens[12],)
    assert store.pool.num_evictable == 4 and store.pool.num_free == store._shapes.num_pages - 1


def test_only_requests_with_the_same_salt_find_what_a_request_has_left():
    """Of one that had no page yet when it was preempted, and of one whose pages were evicted."""
    store, salts = make(), (None, "", "a", "b")
    preempted = running(store, 3, salt="a")
    preempted.pages += store.pool.allocate(1)
    store.keep_unsettled(preempted, store.tree.root("a"))
    leave(store, preempted)
    preempted.tokens += [1, 2, 3]
    store.settle(preempted)
    evicted = running(store, 8, seed=2, salt="b")
    gone = store.publish(evicted, store.tree.root("b"), 4)
    store.tree.remove(gone)
    store.publish(evicted, gone, 8)
    for request, num_pages, has_state in ((preempted, 1, True), (evicted, 2, False)):
        for salt in salts:
            nodes, state = store.tree.match(salt, request.tokens, len(request.tokens))
            is_own = salt == request.cache_salt
            assert (len(nodes), state is not None) == (num_pages * is_own, has_state and is_own)


def test_clear_frees_what_nobody_holds():
    store = make()
    request, other = running(store, 10), running(store, 9, seed=2)
    store.keep_unsettled(request, publish(store, request, 9))
    leave(store, request)
    publish(store, other, 9)
    store.clear()
    assert store.pool.num_evictable == len(store.tree) == 0 and store.take_copies() == []
    assert store.pool.num_free == store._shapes.num_pages - 1 - 3
    leave(store, other)
    assert store.pool.num_free == store._shapes.num_pages - 1


def test_tokens_are_counted_as_looked_up_found_and_found_without_a_state():
    figures = PrefixMetrics()
    figures.of_request(30, num_cached=16, num_matched=24)
    figures.of_request(20, num_cached=19, num_matched=16)  # behind a partly filled page
    figures.skipped["no slot"] += 1
    told = figures.as_dict()
    assert (told["num_queries"], told["num_hits"], told["num_without_state"]) == (50, 35, 8)
    assert told["skipped"] == {"no slot": 1} and told["skipped"] is not figures.skipped
