"""Followers and forks by themselves; what a whole engine makes of them is in test_scheduler."""

import pytest
from fake_device import make_group

from jaxspec.prefix.page_pool import PagePool
from jaxspec.prefix.tree import PrefixTree
from jaxspec.scheduler.forks import ForkedSamples, fork, num_own_pages


def waiting(prompt_len=9, n=3):
    """A leader and the samples that wait for it."""
    group, forked = make_group(1, prompt_len, 4, n=n), ForkedSamples()
    for request in group:
        request.prefill_len = prompt_len
        forked.add(request)
    return forked, group


def test_a_leader_stops_before_its_last_prompt_token_while_others_wait():
    forked, (parent, first, second) = waiting()
    assert forked and forked.of(parent) == [first, second]
    assert forked.prefill_end(parent) == 8 and forked.prefill_end(first) == 9
    parent.prefill_len = 12  # it was preempted and brings its output along
    assert forked.prefill_end(parent) == 12
    forked.release(first)
    forked.release(second)
    parent.prefill_len = 9
    assert forked.prefill_end(parent) == 9


def test_a_sample_waits_for_a_leader_that_runs():
    forked, (parent, first, second) = waiting()
    assert forked.waits(first, [parent]) and not forked.waits(first, [second])
    assert not forked.waits(parent, [parent])
    forked.release(first)
    assert not forked.waits(first, [parent]) and forked.waits(second, [parent])
    forked.dismiss(parent)
    assert not forked and not forked.waits(second, [parent])


def test_a_leader_is_ready_before_its_last_prompt_token():
    forked, (parent, *_) = waiting()
    for num_computed in range(10):
        parent.num_computed = num_computed
        assert forked.ready([parent]) == [parent] * (num_computed == 8)


def test_one_token_has_nothing_to_share():
    forked, _ = waiting(prompt_len=1)
    assert not forked


@pytest.mark.parametrize(("prompt_len", "shared", "own"), [(9, 2, 0), (8, 1, 1), (2, 0, 1)])
def test_full_pages_are_shared_and_a_partial_one_is_copied(prompt_len, shared, own):
    _, (parent, child, _) = waiting(prompt_len)
    pages = PagePool(10, PrefixTree(4), list)
    parent.slot, child.slot, parent.pages = 1, 2, pages.allocate(3)
    assert num_own_pages(parent, page_size=4) == own
    result = fork(parent, child, pages, page_size=4)
    assert child.pages[:shared] == parent.pages[:shared] and len(child.pages) == shared + own
    assert not set(child.pages[shared:]) & set(parent.pages)
    assert result.target_table == tuple(child.pages)
    copied = (parent.pages[shared], child.pages[shared]) if own else (0, 0)
    assert result[:4] == (1, 2, *copied)
    pages.release(parent.pages)
    pages.release(child.pages)
    assert pages.num_free == 9
