"""Whose pages are read, and when; what is saved of them is in tests/proposers."""

import numpy as np
import pytest

from jaxspec.hidden_states.recorder import HiddenStateRecorder
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams


class FakeReader:
    page_size = 4

    def __init__(self):
        self.read_pages = []

    def read(self, pages):
        self.read_pages.append(list(pages))
        return [np.zeros((len(pages), 4, 2), np.float32)]


class FakeWriter:
    def __init__(self):
        self.samples, self.is_closed = [], False

    def put(self, sample):
        self.samples.append(sample)

    def close(self):
        self.is_closed = True


@pytest.fixture
def follower():
    return HiddenStateRecorder(FakeReader(), FakeWriter(), "")


def running(num_output=6, request_id="7", in_flight=0, bound=0):
    """A prompt of 3 tokens and some of its output, on pages from 10 on."""
    request = Request((1, 2, 3), SamplingParams(max_tokens=30), 0, request_id=request_id, index=1)
    request.tokens += range(50, 50 + num_output)
    request.pages = list(range(10, 20))
    request.in_flight, request.in_flight_bound = in_flight, bound
    return request


def end(follower, request, finish):
    request.finish = finish
    follower.leave(request)
    follower.remove(request)


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_the_pages_of_a_request_that_ends_are_read_and_saved(follower, finish):
    request = running()
    follower.add(request)
    end(follower, request, finish)
    assert follower._reader.read_pages == [[10, 11]]  # 8 states, for the last token has none
    assert not follower._writer.samples
    follower.settle(request)
    (sample,) = follower._writer.samples
    assert (sample.request_id, sample.index, sample.prompt_length) == ("7", 1, 3)
    assert sample.token_ids == tuple(request.tokens) and sample.finish_reason == finish.reason
    follower.settle(request)
    assert len(follower._writer.samples) == 1


def test_a_stop_string_found_late_cuts_what_is_saved(follower):
    request = running()
    end(follower, request, Finish.LENGTH)
    del request.tokens[5:]
    request.finish = Finish.STOP
    follower.settle(request)
    assert follower._writer.samples[0].token_ids == (1, 2, 3, 50, 51)


@pytest.mark.parametrize("finish", [Finish.ABORT, Finish.ERROR])
def test_what_an_abort_or_an_error_ended_is_not_saved(follower, finish):
    request = running()
    end(follower, request, finish)
    if finish is Finish.ERROR:
        follower.settle(request)
    assert not follower._writer.samples and not follower._copies


def test_an_error_behind_a_stop_string_is_none(follower):
    request = running()
    end(follower, request, Finish.ERROR)
    del request.tokens[6:]
    request.finish = Finish.STOP
    follower.settle(request)
    assert len(follower._writer.samples) == 1


def test_who_is_preempted_may_end_by_what_is_in_flight(follower):
    request = running(in_flight=2, bound=2)
    follower.leave(request)
    assert follower._reader.read_pages == [[10, 11, 12]]  # 10 states may have come
    request.pages = []
    request.tokens += [60, 61]
    request.finish = Finish.STOP
    follower.remove(request)
    follower.settle(request)
    assert len(follower._writer.samples[0].token_ids) == 11


def test_who_comes_in_again_is_computed_anew(follower):
    request = running(in_flight=1, bound=1)
    follower.leave(request)
    follower.add(request)
    assert not follower._copies
    idle = running()
    follower.leave(idle)  # with nothing in flight it can't end while it waits
    assert len(follower._reader.read_pages) == 1 and not follower._copies


def test_who_is_preempted_and_then_aborted_leaves_nothing(follower):
    request = running(in_flight=1, bound=1)
    follower.leave(request)
    request.finish = Finish.ABORT
    follower.remove(request)
    assert not follower._copies and not follower._writer.samples


def test_only_requests_of_the_prefix_are_read(follower):
    follower._prefix = "keep-"
    for name in ("keep-1", "keep", "7", "xkeep-1"):
        request = running(request_id=name)
        end(follower, request, Finish.STOP)
        follower.settle(request)
    assert [sample.request_id for sample in follower._writer.samples] == ["keep-1"]
    assert len(follower._reader.read_pages) == 1


def test_an_interrupt_and_the_end_leave_nothing(follower):
    for forget in (follower.clear, follower.close):
        request = running(in_flight=1, bound=1)
        follower.leave(request)
        forget()
        assert not follower._copies
    assert follower._writer.is_closed
