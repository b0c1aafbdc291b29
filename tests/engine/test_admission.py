"""Admission: who is counted as what, and who is refused."""

from types import SimpleNamespace

import pytest

from jaxspec.engine.admission import Admission
from jaxspec.engine.errors import DrainingError, EngineDeadError, QueueFullError


class Request:
    """As much of an `OutputQueue` as is read."""

    def __init__(self, num_tokens=1):
        self.sample_streams = [SimpleNamespace(request=SimpleNamespace(prompt=(0,) * num_tokens))]


def admit(admission, *requests):
    handed_on = []
    for request in requests:
        with admission.preparing():
            admission.admit(request, lambda request=request: handed_on.append(request))
    return handed_on


def test_a_request_is_counted_from_its_first_moment_to_its_last():
    admission, request = Admission(None, None), Request()
    with admission.preparing():
        assert (admission.num_waiting, admission.num_unfinished) == (1, 1)
    assert (admission.num_waiting, admission.num_unfinished) == (0, 0)  # it was refused
    assert admit(admission, request) == [request]
    assert (admission.num_waiting, admission.num_unfinished) == (1, 1)
    admission.begun(request)
    admission.begun(request)
    assert (admission.num_waiting, admission.num_unfinished) == (0, 1)
    admission.over(request)
    admission.over(request)
    assert (admission.num_waiting, admission.num_unfinished) == (0, 0)


def test_no_more_wait_than_may():
    admission, first, second = Admission(2, None), Request(), Request()
    admit(admission, first, second)
    for _ in range(3):
        with pytest.raises(QueueFullError, match="max_num_queued_reqs=2.* would hold 3"):
            admit(admission, Request())
    admission.begun(first)
    with admission.preparing(), pytest.raises(QueueFullError):  # that one counts as well
        admit(admission, Request())
    admit(admission, Request())
    assert admission.num_waiting == 2


def test_a_long_prompt_comes_in_if_nobody_waits():
    admission, long = Admission(None, 10), Request(100)
    assert admit(admission, long) == [long]
    with pytest.raises(QueueFullError, match="max_num_queued_tokens=10.* would hold 101"):
        admit(admission, Request())
    admission.begun(long)
    admit(admission, Request(4), Request(6))
    with pytest.raises(QueueFullError):
        admit(admission, Request())
    assert admission.num_waiting == 2


def test_a_drain_lets_those_in_that_are_being_prepared_and_waits_for_the_last():
    admission, request = Admission(None, None), Request()
    with admission.preparing():
        idle = admission.drain()
        with pytest.raises(DrainingError):
            admit(admission, Request())
        admission.admit(request, lambda: None)
    assert not idle.done()
    admission.over(request)
    assert idle.done() and admission.drain().done()


def test_a_closed_one_admits_nobody_and_says_why():
    admission, request = Admission(None, None), Request()
    admit(admission, request)
    admission.check_open()
    with admission.preparing():
        assert admission.close(lambda: EngineDeadError(OSError())) == [request]
        with pytest.raises(EngineDeadError):
            admission.admit(Request(), lambda: None)
    for refused in (admission.check_open, lambda: admit(admission, Request())):
        with pytest.raises(EngineDeadError):
            refused()
