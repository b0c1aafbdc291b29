"""Processes that trace: each request gets its answer or None, and none outlives its block."""

import contextlib
import logging
import os
import subprocess
import sys
import time

import pytest

from jaxspec.pallas import dispatch
from jaxspec.runner.programs import trace_processes
from jaxspec.runner.programs.trace_processes import EarlyTraces, TraceProcesses, num_processes

ECHO = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
FAIL = "import sys; sys.stdin.read(); sys.exit('no such model')"
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def worker(monkeypatch):
    """Sets what the processes run; all that were started."""
    started = []

    def run(code):
        def start():
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            started.append(subprocess.Popen([sys.executable, "-c", code], **pipes))
            return started[-1]

        monkeypatch.setattr(trace_processes, "_started", start)
        return started

    return run


def answers(requests, count=1):
    with contextlib.closing(TraceProcesses(count)) as processes:
        return [answer.result() for answer in [processes.ask(each) for each in requests]]


def test_each_request_gets_its_answer(worker):
    started = worker(ECHO)
    requests = [name * 100_000 for name in (b"ab", b"cd", b"ef")]
    assert answers(requests, 2) == [request[::-1] for request in requests]
    assert [process.returncode for process in started] == [0] * 3


def test_early_traces_are_found_by_their_fingerprint(worker):
    started = worker(ECHO)
    early = EarlyTraces({"one": b"ab", "two": b"cd"})
    assert early.get("two").result() == b"dc" and early.get("one").result() == b"ba"
    assert early.get(None) is None and early.get("three") is None
    early.close()
    assert len(started) == 2 and all(process.returncode is not None for process in started)


def test_a_process_that_fails_gives_none_and_a_line_in_the_log(worker, caplog):
    caplog.set_level(logging.INFO, trace_processes.__name__)
    worker(FAIL)
    assert answers([b"x"]) == [None]
    assert "ended with 1: no such model" in caplog.text


def test_a_process_that_cannot_be_started_gives_none(monkeypatch, caplog):
    caplog.set_level(logging.INFO, trace_processes.__name__)
    monkeypatch.setattr(trace_processes.sys, "executable", os.devnull)
    assert answers([b"x"]) == [None]
    assert "no process traces a program" in caplog.text


def test_an_interrupt_ends_those_that_run_and_starts_no_more(worker):
    started = worker(SLEEP)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), contextlib.closing(TraceProcesses(2)) as processes:
        asked = [processes.ask(b"") for _ in range(5)]
        while len(started) < 2 and time.monotonic() < begin + 60:
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 60
    assert len(started) == 2 and all(process.returncode for process in started)
    assert [answer.result() for answer in asked] == [None] * 5


@pytest.mark.parametrize(
    ("cores", "programs", "processes"),
    [(1, 9, 0), (2, 9, 0), (3, 9, 2), (16, 9, 8), (16, 3, 3), (16, 1, 0), (16, 0, 0)],
)
def test_as_many_processes_as_programs_and_free_cores(cores, programs, processes, monkeypatch):
    monkeypatch.setattr(trace_processes, "num_cores", lambda: cores)
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))
    assert num_processes(programs) == processes


def test_no_process_where_no_kernel_makes_tracing_slow(monkeypatch):
    monkeypatch.setattr(trace_processes, "num_cores", lambda: 16)
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (False, "this is a test"))
    assert num_processes(9) == 0


@pytest.mark.parametrize("executable", ["", None])
def test_no_process_where_there_is_no_python_to_start(executable, monkeypatch):
    monkeypatch.setattr(trace_processes, "num_cores", lambda: 16)
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))
    assert num_processes(9) == 8
    monkeypatch.setattr(trace_processes.sys, "executable", executable)
    assert num_processes(9) == 0


def test_a_process_that_takes_too_long_is_ended(worker, monkeypatch, caplog):
    caplog.set_level(logging.INFO, trace_processes.__name__)
    monkeypatch.setattr(trace_processes, "TIME_LIMIT", 0.2)
    started = worker(SLEEP)
    assert answers([b"x"]) == [None]
    assert started[0].returncode and "TimeoutExpired" in caplog.text
