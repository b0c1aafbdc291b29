"""What is kept of requests and what others find of it, on a device that checks every page."""

import numpy as np
import pytest
from fake_device import make_group, next_token
from loop import Loop, group_of, run, wander
from pairwise import crossed

from jaxspec.plan.plan import StateExport
from jaxspec.prefix import cache as prefix_cache
from jaxspec.prefix import store as prefix_store
from jaxspec.prefix import tree as prefix_tree
from jaxspec.requests.request import Finish
from jaxspec.scheduler.scheduler import Scheduler

PAGES = {"prefix_caching": "pages"}
ALL = {"prefix_caching": "all", "num_checkpoints": 4}
ALIGN = {"prefix_caching": "align", "num_checkpoints": 4, "checkpoint_interval": 8}
MODES = pytest.mark.parametrize("mode", [PAGES, ALL, ALIGN], ids=["pages", "all", "align"])
SALTS = None, "", "a"


def loop_of(mode, min_uncached=4, **sizes):
    loop = Loop(**mode, **sizes)
    loop.scheduler.prefixes.min_uncached = min_uncached
    loop.scheduler.prefixes.min_turn = 3
    return loop


def check_that_nothing_is_left(loop):
    """All is free once what is kept is forgotten."""
    loop.scheduler.prefixes.clear()
    store = loop.scheduler.prefixes.store
    assert len(store.tree) == len(store.states) == store.pool.num_evictable == 0
    assert sorted(loop.scheduler.pages._free) == list(range(1, loop.scheduler.shapes.num_pages))
    assert len(store.free_slots) == loop.scheduler.shapes.num_checkpoints


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mode, num_drafts, page_size, chunk", crossed((PAGES, ALL, ALIGN), (0, 3), (1, 4, 16), (7, 64))
)
def test_a_random_walk_among_shared_prefixes_gives_every_request_what_it_gets_alone(
    mode, num_drafts, page_size, chunk
):
    """Hits, junctions, forks, evictions, preemptions, aborts; every page and state is checked."""
    random = np.random.default_rng(num_drafts * 100 + page_size * 1000 + chunk)
    longest = -(-40 // page_size)
    counts = np.zeros(4, int)

    def dress(group):
        ends = random.integers(1, 1 + len(group[0].prompt), size=random.integers(3))
        for request in group:
            request.cache_boundaries = tuple(ends.tolist())

    for num_requests in (1, 2, 5):
        loop = loop_of(
            mode,
            num_drafts=num_drafts,
            page_size=page_size,
            chunk=chunk,
            num_pages=1 + longest * num_requests,
            steps_per_dispatch=int(random.choice([1, 3])),
        )
        wander(loop, random, 120, SALTS, dress)
        stats = loop.scheduler.prefixes.counts
        evicted = stats.num_evicted_pages + stats.num_evicted_checkpoints
        device, preemptions = loop.device, loop.scheduler.num_preemptions
        counts += [device.num_restores, device.num_forks, evicted, preemptions]
        check_that_nothing_is_left(loop)
    assert min(counts) > 2, counts


@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_is_found_up_to_its_last_token(depth):
    """Full pages of it on a model without states; all of it behind a state at its end."""
    for mode, want in ((PAGES, 20), (ALL, 21)):
        loop = loop_of(mode, depth=depth)
        assert run(loop, group_of(1, 22, 22)) == [0]
        assert run(loop, group_of(2, 22, 22)) == [want]
        check_that_nothing_is_left(loop)


def test_a_short_prompt_is_found_when_it_is_first_repeated():
    """By a state before its last token, unless it has less than a page in front of that."""
    for length in (2, 4, 5, 6, 16, 17, 22, 35):
        loop = loop_of(ALL, min_uncached=1000)
        cached = [run(loop, group_of(seed, length, length)) for seed in (1, 2, 3)]
        want = [length - 1] if length > 4 else [0]
        assert cached == [[0], want, want]
        check_that_nothing_is_left(loop)


def test_a_short_end_of_a_long_known_prompt_gets_no_step_of_its_own():
    loop = loop_of(ALL, min_uncached=1000, chunk=64)
    run(loop, group_of(1, 22, 22))
    before = len(loop.device.log)
    assert run(loop, group_of(2, 22, 34)) == [21]
    assert [tokens for _, chunks in loop.device.log[before:] for _, tokens in chunks] == [13]
    assert run(loop, group_of(3, 0, 3)) == [0]


def test_prompts_that_are_never_repeated_leave_the_states_of_others():
    """Those of their ends and outputs have few slots; the newest of them is found, too."""
    loop = loop_of({**ALL, "num_checkpoints": 8}, min_uncached=1000, num_pages=400)
    assert [run(loop, group_of(n, 22, 22)) for n in (1, 2)] == [[0], [21]]
    for n in range(10, 40):
        run(loop, group_of(n, 0, 9 + n % 20))
    assert run(loop, group_of(3, 22, 22)) == [21]
    (again,) = group_of(40, 0, 28)
    again.prompt = loop.requests[39].prompt
    again.tokens = list(again.prompt)
    assert run(loop, [again]) == [27]


def test_the_third_prompt_is_found_where_the_first_two_part():
    loop = loop_of(ALL, min_uncached=1000)
    cached = [run(loop, group_of(seed, 14, 20)) for seed in (1, 2, 3)]
    assert cached == [[0], [0], [12]]
    assert loop.scheduler.prefixes.counts.num_without_state == 12


def test_an_output_that_goes_on_as_the_next_prompt_is_found_to_its_end():
    loop = loop_of(ALL, min_uncached=1000)
    (first,) = group_of(1, 9, 9, max_tokens=6)
    run(loop, [first])
    (second,) = make_group(2, 20, 4)
    second.prompt = second.prompt[:0] + tuple(first.tokens) + (7, 8)
    second.tokens, second.max_len = list(second.prompt), len(second.prompt) + 4
    assert run(loop, [second]) == [len(first.tokens) - 1]


def boundaries_of(loop, prompt_len, *boundaries):
    """Where a prompt's chunks end, if nothing of it is known."""
    loop.scheduler.prefixes.clear()
    (request,) = group_of(1 + len(loop.requests), 0, prompt_len)
    request.cache_boundaries = boundaries
    before = len(loop.device.log)
    run(loop, [request])
    chunks = [tokens for _, chunks in loop.device.log[before:] for _, tokens in chunks]
    return [sum(chunks[: n + 1]) for n in range(len(chunks))]


def test_a_prompt_leaves_a_state_where_the_next_turn_will_part_from_it():
    loop = loop_of(ALL, min_uncached=1000)
    (first,) = group_of(1, 14, 14)
    first.cache_boundaries = (11,)
    run(loop, [first])
    (second,) = group_of(2, 11, 30)
    second.cache_boundaries = (11, 25)
    assert run(loop, [second]) == [11]
    assert run(loop, group_of(3, 11, 13)) == [11]
    (third,) = make_group(4, 27, 4)
    third.prompt = second.prompt[:25] + third.prompt[25:]
    third.tokens = list(third.prompt)
    assert run(loop, [third]) == [25]
    check_that_nothing_is_left(loop)


def test_a_boundary_costs_a_step_only_where_it_saves_enough():
    """Where it doubles what is found or ends a turn; then the end may need no step."""
    loop = loop_of(ALL, min_uncached=1000, chunk=64)
    loop.scheduler.prefixes.min_turn = 8
    assert boundaries_of(loop, 30) == [29]
    assert boundaries_of(loop, 30, 3) == [29]  # less than a page
    assert boundaries_of(loop, 30, 8) == [8, 29]
    assert boundaries_of(loop, 30, 15, 18) == [15, 30]
    assert boundaries_of(loop, 30, 20, 9, 16) == [9, 20, 30]
    assert boundaries_of(loop, 30, 30) == [29]  # the last token is a row of its own
    loop.scheduler.prefixes.min_uncached = 10
    assert boundaries_of(loop, 30, 10) == [10, 29]
    assert boundaries_of(loop, 30, 20) == [20, 30]


def test_where_the_user_will_speak_again_stays_while_tools_are_called():
    """Each call leaves states, and names that one still, so others make room for them."""
    loop = loop_of({**ALL, "num_checkpoints": 3}, min_uncached=1000)
    (first,) = group_of(1, 6, 6, max_tokens=1)
    first.cache_boundaries = (5,)
    run(loop, [first])
    tokens = first.tokens
    for seed in range(2, 6):
        (call,) = make_group(seed, len(tokens) + 3, 1)
        call.prompt = (*tokens, *call.prompt[:3])
        call.tokens = list(call.prompt)
        call.cache_boundaries = (5, len(call.prompt) - 1)
        (cached,) = run(loop, [call])
        assert cached == len(tokens) - 1 or seed == 2
        tokens = call.tokens
    assert run(loop, group_of(9, 5, 8)) == [5]


def test_samples_of_one_prompt_enter_on_a_prefix_and_fork_there():
    loop = loop_of(ALL)
    run(loop, group_of(1, 22, 22))
    assert run(loop, group_of(2, 22, 22, n=3)) == [21, 0, 0]
    assert loop.device.num_forks == 2


def test_states_lie_at_multiples_of_the_interval_alone_where_that_is_the_mode():
    loop = loop_of(ALIGN)
    assert run(loop, group_of(1, 22, 22)) == [0]
    assert run(loop, group_of(2, 22, 22)) == [16]
    lengths = {node.depth * 4 for node in loop.scheduler.prefixes.store.states}
    assert lengths == {8, 16}


@pytest.mark.parametrize("mode", [PAGES, ALL], ids=["pages", "all"])
def test_a_preempted_request_goes_on_from_its_own_prefix(mode):
    """Also if steps were in flight, and it was not known yet how many of its tokens stand."""
    for depth in (0, 2):
        loop = loop_of(mode, depth=depth, num_drafts=3)
        (request,) = group_of(1, 10, 10, max_tokens=20)
        loop.add([request])
        for _ in range(6):
            loop.turn()
        loop.scheduler.preempt(request)
        num_known = len(request.tokens)
        loop.run()
        resumed = loop.scheduler.prefixes.counts.num_resumed
        assert resumed >= num_known - 1 - 3 * (mode is PAGES) and request.num_cached_tokens == 0
        check_that_nothing_is_left(loop)


def test_what_a_preempted_request_left_is_given_up_when_pages_are_short_or_it_is_aborted():
    for way in ("short", "abort"):
        loop = loop_of(ALL, depth=3, num_drafts=3, num_pages=1 + 13)
        (request,) = group_of(1, 10, 10, max_tokens=20)
        loop.add([request])
        for _ in range(4):
            loop.turn()
        loop.scheduler.preempt(request)
        store = loop.scheduler.prefixes.store
        assert store._pending
        if way == "short":
            loop.scheduler.pages.release(loop.scheduler.pages.allocate(13))
        else:
            loop.scheduler.end(request, Finish.ABORT)
        assert not store._pending and store._metrics.skipped["dropped"] == 1
        loop.run()
        check_that_nothing_is_left(loop)


def test_an_error_forgets_all_that_is_kept():
    """Nobody knows which pages and states hold what was no number."""
    loop = loop_of(ALL)
    run(loop, group_of(1, 22, 22))
    prefixes = loop.scheduler.prefixes
    assert len(prefixes.store.tree) and len(prefixes.store.states)
    prefixes.ended(loop.requests[1], Finish.ERROR)
    assert not len(prefixes.store.tree) and not len(prefixes.store.states)
    assert run(loop, group_of(2, 22, 22)) == [0]


def test_after_a_reset_nothing_is_found_and_what_runs_goes_on():
    loop = loop_of(ALL)
    run(loop, group_of(1, 22, 22))
    (running,) = group_of(2, 22, 22, max_tokens=9)
    loop.add([running])
    loop.turn()
    loop.scheduler.prefixes.clear()
    loop.run()
    assert len(loop.scheduler.prefixes.store.tree) == 0  # nor was anything kept of what ran
    assert run(loop, group_of(3, 22, 22)) == [0]


def test_salts_share_nothing():
    loop = loop_of(ALL)
    cached = [run(loop, group_of(n, 22, 22, salt=salt)) for n, salt in enumerate(("a", None, "a"))]
    assert cached == [[0], [0], [21]]


# Bugs that others shipped, planted in the books.

REAL_MATCH, REAL_FIND = prefix_tree.PrefixTree.match, prefix_cache.PrefixCache.find
REAL_GIVEN, REAL_KEEP = prefix_cache.PrefixCache.given, prefix_store.PrefixStore.keep
REAL_BEGIN, REAL_TAKE = prefix_cache.PrefixCache._begin, prefix_store.PrefixStore.take_copies
REAL_ADVANCE, REAL_POOL = Scheduler._advance_prefill, prefix_cache.PrefixCache.new_pool


def a_state_one_token_off(store, request, node, length, **how):
    REAL_KEEP(store, request, node, length - 1, **how)


def the_state_of_the_neighbour(store):
    return [
        each._replace(row=each.row ^ 1) if isinstance(each, StateExport) else each
        for each in REAL_TAKE(store)
    ]


def kept_after_the_plan(store):
    now = REAL_TAKE(store)
    late, store.late = getattr(store, "late", []), [x for x in now if isinstance(x, StateExport)]
    return late + [each for each in now if not isinstance(each, StateExport)]


def a_partial_page_shared(prefixes, request, hit):
    fork = REAL_BEGIN(prefixes, request, hit)
    if not hit.tail_page:
        return fork
    prefixes.store.pool.release(request.pages[-1:])
    prefixes.store.pool.share([hit.tail_page])
    request.pages[-1] = hit.tail_page
    return fork._replace(source_page=0, target_page=0, target_table=tuple(request.pages))


def pages_of_drafts_published(prefixes, request):
    REAL_GIVEN(prefixes, request)
    if request in prefixes._at:
        tokens = request.tokens
        request.tokens = [*tokens, *[next_token(request.seed, len(tokens) + i) for i in range(3)]]
        upto = min(len(request.tokens), len(request.pages) * prefixes.shapes.page_size)
        prefixes._publish(request, upto)
        request.tokens = tokens


def the_whole_prompt_found(tree, salt, tokens, limit):
    return REAL_MATCH(tree, salt, tokens, limit + 1)


def found_in_the_plan_that_writes_it(scheduler, request, step):
    REAL_ADVANCE(scheduler, request, step)
    for each, length in step.prefills:
        if each is request:
            scheduler.prefixes._publish(request, request.num_computed + length)


def books_that_outlive_the_device(prefixes):
    pool = prefixes.store.pool if hasattr(prefixes, "store") else REAL_POOL(prefixes)
    return pool


def no_salts(tree, salt, tokens, limit):
    return max((REAL_MATCH(tree, each, tokens, limit) for each in tree._roots), key=_depth,
               default=prefix_tree.PrefixMatch([], None))  # fmt: skip


def _depth(match):
    return len(match.nodes)


BUGS = {
    "a state one token off": (prefix_store.PrefixStore, "keep", a_state_one_token_off),
    "the state of the neighbour": (
        prefix_store.PrefixStore, "take_copies", the_state_of_the_neighbour,
    ),
    "kept after the slot was given out": (
        prefix_store.PrefixStore, "take_copies", kept_after_the_plan,
    ),
    "a partial page shared": (prefix_cache.PrefixCache, "_begin", a_partial_page_shared),
    "pages of drafts": (prefix_cache.PrefixCache, "given", pages_of_drafts_published),
    "the whole prompt found": (prefix_tree.PrefixTree, "match", the_whole_prompt_found),
    "found in the plan that writes it": (
        Scheduler, "_advance_prefill", found_in_the_plan_that_writes_it,
    ),
    "books that outlive the device": (
        prefix_cache.PrefixCache, "new_pool", books_that_outlive_the_device,
    ),
    "no salts": (prefix_tree.PrefixTree, "match", no_salts),
}  # fmt: skip


def hits_of_every_kind(mode):
    """Prompts at once and one after the other, long outputs, a reset, and salts."""
    loop = loop_of(mode, depth=2, num_drafts=3, chunk=64)
    loop.add(*(group_of(n, 14, 20, max_tokens=12) for n in range(1, 5)))
    loop.run()
    for numbers in ((20,), (21, 22), (23,)):
        loop.add(*(group_of(n, 22, 22, max_tokens=9) for n in numbers))
        loop.run()
    for n in (30, 31):
        run(loop, group_of(n, 20, 20, max_tokens=9))
    for n in range(5, 10):
        run(loop, group_of(n, 13 + n, 22, max_tokens=8))
    assert run(loop, group_of(10, 22, 22, salt="a")) == [0]
    loop.drain()
    loop.scheduler.reset()
    loop.device.reset()
    assert run(loop, group_of(11, 22, 22)) == [0]


def test_hits_of_every_kind_pass():
    for mode in (PAGES, ALL):
        hits_of_every_kind(mode)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, monkeypatch):
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for mode in (PAGES, ALL):
            hits_of_every_kind(mode)
