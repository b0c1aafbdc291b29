"""Followers and forks by themselves; what a whole engine makes of them is in test_scheduler."""

import pytest
from fake_device import make_group

from jaxspec.scheduler.forks import Followers, fork, num_own_pages
from jaxspec.scheduler.page_pool import PagePool


def waiting(prompt_len=9, n=3):
    """A leader and the samples that wait for it."""
    group, followers = make_group(1, prompt_len, 4, n=n), Followers()
    for request in group:
        request.prefill_len = prompt_len
        followers.add(request)
    return followers, group


def test_a_leader_stops_before_its_last_prompt_token_while_others_wait():
    followers, (leader, first, second) = waiting()
    assert followers and followers.of(leader) == [first, second]
    assert followers.prefill_end(leader) == 8 and followers.prefill_end(first) == 9
    leader.prefill_len = 12  # it was preempted and brings its output along
    assert followers.prefill_end(leader) == 12
    followers.release(first)
    followers.release(second)
    leader.prefill_len = 9
    assert followers.prefill_end(leader) == 9


def test_a_sample_waits_for_a_leader_that_runs():
    followers, (leader, first, second) = waiting()
    assert followers.waits(first, [leader]) and not followers.waits(first, [second])
    assert not followers.waits(leader, [leader])
    followers.release(first)
    assert not followers.waits(first, [leader]) and followers.waits(second, [leader])
    followers.dismiss(leader)
    assert not followers and not followers.waits(second, [leader])


def test_a_leader_is_ready_before_its_last_prompt_token():
    followers, (leader, *_) = waiting()
    for num_computed in range(10):
        leader.num_computed = num_computed
        assert followers.ready([leader]) == [leader] * (num_computed == 8)


def test_one_token_has_nothing_to_share():
    followers, _ = waiting(prompt_len=1)
    assert not followers


@pytest.mark.parametrize(("prompt_len", "shared", "own"), [(9, 2, 0), (8, 1, 1), (2, 0, 1)])
def test_full_pages_are_shared_and_a_partial_one_is_copied(prompt_len, shared, own):
    _, (leader, child, _) = waiting(prompt_len)
    pages = PagePool(10)
    leader.slot, child.slot, leader.pages = 1, 2, pages.allocate(3)
    assert num_own_pages(leader, page_size=4) == own
    result = fork(leader, child, pages, page_size=4)
    assert child.pages[:shared] == leader.pages[:shared] and len(child.pages) == shared + own
    assert not set(child.pages[shared:]) & set(leader.pages)
    assert result.target_table == tuple(child.pages)
    copied = (leader.pages[shared], child.pages[shared]) if own else (0, 0)
    assert result[:4] == (1, 2, *copied)
    pages.release(leader.pages)
    pages.release(child.pages)
    assert pages.num_free == 9
