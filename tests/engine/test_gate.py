"""The gate: reasons for which no step runs, and what is refused meanwhile."""

import threading

import pytest

from jaxspec.engine.errors import AsleepError, PausedError
from jaxspec.engine.gate import Gate


def test_it_is_open_once_no_reason_is_left():
    gate = Gate()
    gate.wait()
    gate.close("pause", "weights")
    gate.open("pause", "kv_cache")
    assert not gate.is_open and gate.is_closed_by("weights", "kv_cache")
    gate.open("weights")
    assert gate.is_open and not gate.is_closed_by("pause", "weights", "kv_cache")


def test_the_thread_that_closed_it_never_waits_and_others_do():
    gate, done = Gate(), []
    gate.close("pause")
    with pytest.raises(PausedError):
        gate.wait()

    def wait():
        while not gate.is_open:
            gate.wait()
        done.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    assert not done
    gate.open("pause")
    thread.join()
    assert done


def test_requests_are_refused_until_it_opens_for_the_reason():
    gate = Gate()
    gate.refuse("pause")
    with pytest.raises(PausedError):
        gate.check_admits()
    gate.close("pause", "weights")
    gate.open("pause")
    gate.check_admits()
    gate.refuse("drain")
    gate.admit("drain")
    gate.check_admits()


def test_what_is_freed_is_not_used():
    gate = Gate()
    gate.close("pause")
    gate.check_awake()
    gate.close("kv_cache")
    gate.check_awake("weights")
    for parts in ((), ("kv_cache",)):
        with pytest.raises(AsleepError):
            gate.check_awake(*parts)
