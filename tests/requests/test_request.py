"""One request on the host: its counts, its times, and why it ended."""

import dataclasses

import pytest

from jaxspec.requests.request import Finish, Request, RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("steps", "totals", "per_position"),
    [
        # (drafted and accepted by position), totals of the peer's table.
        ([([1, 1, 1], [1, 1, 1])], (1, 3, 3), [1, 1, 1]),
        ([([1, 1, 1], [1, 0, 0])], (1, 3, 1), [1, 0, 0]),
        ([([1, 1], [1, 1]), ([1], [1])], (2, 3, 3), [2, 1]),
        ([([1], [1]), ([1, 1], [1, 1])], (2, 3, 3), [2, 1]),
        ([([1], [1])], (1, 1, 1), [1]),
        ([], (0, 0, 0), []),
        ([([0, 0, 0], [0, 0, 0]), ([1, 0, 0], [0, 0, 0])], (1, 1, 0), [0, 0, 0]),
        ([([1, 1, 1], [1, 1, 0]), ([1, 1, 1], [1, 0, 0])], (2, 6, 3), [2, 1, 0]),
        ([([2, 2, 2], [2, 1, 0])], (2, 6, 3), [2, 1, 0]),
    ],
)
def test_acceptance_statistics_equal_the_table(steps, totals, per_position):
    metrics = RequestMetrics()
    before = dataclasses.replace(metrics)
    for step in steps:
        metrics.record(*step)
    assert before.accepted_per_position == [], "a copy keeps its own"
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == totals
    assert metrics.accepted_per_position == per_position
    mean = 1 + totals[2] / totals[0] if totals[0] else 1.0
    assert metrics.mean_acceptance_length == mean


def test_times_are_measured_from_arrival_and_between_tokens():
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.ttft is None and metrics.tpot is None
    metrics.first_token_time = metrics.last_token_time = 10.5
    metrics.num_tokens = 1
    assert metrics.ttft == 0.5 and metrics.tpot is None
    metrics.last_token_time, metrics.num_tokens = 11.5, 5
    assert metrics.tpot == 0.25


def test_the_first_row_counts_of_a_request_and_of_several():
    metrics, other = RequestMetrics(), RequestMetrics()
    assert metrics.scheduled_time is None
    assert RequestMetrics.total([metrics, other]).scheduled_time is None
    metrics.record_row(0.0)
    metrics.record_row(1.0)  # it was preempted meanwhile
    assert metrics.scheduled_time == 0.0
    other.record_row(0.5)
    assert RequestMetrics.total([other, metrics, RequestMetrics()]).scheduled_time == 0.0


def test_no_request_shares_what_grows():
    params = SamplingParams(max_tokens=5)
    one, other = Request((1, 2), params, 0), Request((1, 2), params, 0)
    one.tokens.append(3)
    one.pages.append(4)
    one.draft_positions.append(1)
    one.metrics.record([1], [1])
    assert (other.tokens, other.pages, other.metrics.num_drafts) == ([1, 2], [], 0)
    assert other.draft_positions == []
    assert one != other and len({one, other}) == 2


def test_the_bound_counts_every_draft_in_flight_up_to_the_end():
    request = Request((1, 2, 3), SamplingParams(max_tokens=6), 0)
    assert (request.tokens_bound, request.max_len) == (3, 9)
    request.in_flight_bound = 4
    assert request.tokens_bound == 7
    request.tokens += [4, 5, 6]
    assert request.tokens_bound == 9
    assert request.output == [4, 5, 6]


def test_users_see_a_word_for_each_end():
    words = {finish: finish.reason for finish in Finish}
    assert words.pop(Finish.RUNNING) is None
    assert {finish.name: word for finish, word in words.items()} == {
        "STOP": "stop",
        "LENGTH": "length",
        "ERROR": "error",
        "ABORT": "abort",
    }


def test_wall_clock_times_are_as_far_apart_as_the_monotonic_ones():
    metrics = RequestMetrics(arrival_time=10.0, arrival_wall_time=1e9)
    assert metrics.first_token_wall_time is None and metrics.last_token_wall_time is None
    metrics.record_tokens(1, now=10.5)
    metrics.record_tokens(2, now=12.0)
    assert metrics.first_token_wall_time == 1e9 + 0.5
    assert metrics.last_token_wall_time == 1e9 + 2.0
    later = RequestMetrics(arrival_time=11.0, arrival_wall_time=1e9 + 1)
    assert RequestMetrics.total([later, metrics]).last_token_wall_time == 1e9 + 2.0


@pytest.mark.parametrize(
    ("asked", "room", "length"), [(4, 99, 6), (4, 5, 5), (None, 99, 99), (2**62, 99, 99)]
)
def test_a_request_ends_at_what_was_asked_for_or_where_the_room_does(asked, room, length):
    params = SamplingParams(max_tokens=asked)
    assert Request((1, 2), params, seed=0, room=room).max_len == length
