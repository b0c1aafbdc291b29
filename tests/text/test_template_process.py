"""Templates run apart: within limits, for all threads, and never longer than who asked."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from threads import ctrl_c_after, in_threads

from jaxspec.text import template_process
from jaxspec.text.template_process import (
    NUM_PROCESSES,
    TemplateFailure,
    TemplateProcess,
    TemplateProcesses,
)

ENDLESS = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set x = namespace(s='a' * 10 ** 8) %}"
    "{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}"
)


@pytest.fixture
def process():
    process = TemplateProcess()
    assert process.render("{{ a }}", {"a": "ready"}).text == "ready"  # it has started
    return process


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ '%9999999999d' % 3 }}", "memory"),
        ("{{ 'a' | center(10 ** 10) }}", "memory"),
        (DOUBLING, "memory"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "wrote more than 8,388,608"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "RecursionError"),
        ("{% for i in range(10 ** 6) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_that_wants_too_much_fails_and_the_next_one_renders(
    source, reason, process, monkeypatch
):
    monkeypatch.setattr(template_process, "TIME_LIMIT", 60)  # the machine may be busy
    with pytest.raises(TemplateFailure, match=reason):
        process.render(source, {})
    assert process.render("{{ a }}", {"a": 3}).text == "3"


def test_a_template_has_so_many_seconds(process, monkeypatch):
    monkeypatch.setattr(template_process, "TIME_LIMIT", 0.3)
    started = time.monotonic()
    with pytest.raises(TemplateFailure, match="it took more than 0.3 seconds"):
        process.render(ENDLESS, {})
    assert 0.2 < time.monotonic() - started < 3
    monkeypatch.setattr(template_process, "TIME_LIMIT", 5)
    assert process.render("after", {}).text == "after"


LOOP = "{% for m in messages %}{{ m }}{% endfor %}"


def test_turns_are_tried_and_what_stays_is_counted(process):
    asked = {"messages": ["ab", "c"]}
    assert process.render(LOOP, asked, [["x"], []]) == ("abc", (3, 3))
    last = "{{ messages[-1] }}"
    assert process.render(last, asked, [["cd"], ["d"]]) == ("c", (1, 0))
    fails = "{{ raise_exception('three') if messages | length > 2 }}" + LOOP
    assert process.render(fails, asked, [["x"]]) == ("abc", (0,))
    assert process.render(LOOP, asked) == ("abc", ())


def test_turns_that_take_too_long_cost_no_text(process, monkeypatch):
    monkeypatch.setattr(template_process, "TURNS_TIME_LIMIT", 0.3)
    slow = "{{ messages[0] }}{% if messages | length > 1 %}" + ENDLESS + "{% endif %}"
    assert process.render(slow, {"messages": ["a"]}, [["b"], ["c"]]) == ("a", (0, 0))
    assert process.render(LOOP, {"messages": ["a"]}, [["b"]]) == ("a", (1,))


def test_a_template_is_quick_once_the_process_runs(process):
    times = []
    for _ in range(20):
        started = time.perf_counter()
        process.render("{% for m in messages %}{{ m }}{% endfor %}", {"messages": ["a"] * 20})
        times.append(time.perf_counter() - started)
    assert sorted(times)[10] < 0.01


def test_a_process_that_was_ended_from_outside_is_started_anew(process):
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(TemplateFailure, match="ended with status -9"):
        process.render("lost", {})
    assert process.render("found", {}).text == "found"


def test_each_thread_gets_its_own_text(process):
    def ask(number):
        return [process.render("{{ n }}", {"n": number * 100 + i}).text for i in range(50)]

    results = in_threads(*(lambda n=n: ask(n) for n in range(4)))
    assert results == [[str(n * 100 + i) for i in range(50)] for n in range(4)]


def test_ctrl_c_leaves_no_answer_behind(process):
    with ctrl_c_after(0.2, heard_within=2):
        process.render(ENDLESS, {})
    assert process.render("mine", {}).text == "mine"


def test_the_process_ends_with_its_owner():
    process = TemplateProcess()
    process.render("a", {})
    running = process._process
    del process
    gc.collect()
    assert running.returncode is not None


def test_a_forked_process_starts_its_own_and_leaves_the_first_alone():
    """In a Python without JAX, whose threads a fork may break."""
    script = f"""
        import importlib.util, os, sys
        spec = importlib.util.spec_from_file_location("it", {template_process.__file__!r})
        it = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(it)
        one = it.TemplateProcess()
        one.render("a", {{}})
        first = one._process.pid
        with one._lock:  # as if a thread rendered meanwhile
            child = os.fork()
        if not child:
            good = one.render("child", {{}}).text == "child" and one._process.pid != first
            sys.exit(not good)
        assert os.waitpid(child, 0)[1] == 0
        assert one.render("parent", {{}}).text == "parent" and one._process.pid == first
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_without_a_python_to_run_a_template_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(TemplateFailure, match="could not be started: No such file"):
        TemplateProcess().render("a", {})


def test_templates_that_never_end_leave_a_process_to_others(monkeypatch):
    monkeypatch.setattr(template_process, "TIME_LIMIT", 60)  # the machine may be busy
    processes, rendered = TemplateProcesses(), threading.Event()
    earlier = {*template_process._ALL}

    def started():
        mine = [each for each in {*template_process._ALL} - earlier if each._process]
        return [each._process for each in mine]

    def endless():
        with pytest.raises(TemplateFailure, match="ended with status -9"):
            processes.render(ENDLESS, {})
        return rendered.is_set()

    def quick():
        while len(started()) < NUM_PROCESSES - 1:
            time.sleep(0.01)
        found = [processes.render("{{ a }}", {"a": n}).text for n in range(20)]
        rendered.set()
        assert len(started()) == NUM_PROCESSES
        for process in started():
            process.kill()
        return found == [*map(str, range(20))]

    assert all(in_threads(quick, *[endless] * (NUM_PROCESSES - 1)))


def test_further_threads_wait_for_a_process():
    processes = TemplateProcesses()

    def ask(number):
        return [processes.render("{{ n }}", {"n": number * 100 + i}).text for i in range(20)]

    results = in_threads(*(lambda n=n: ask(n) for n in range(3 * NUM_PROCESSES)))
    assert results == [[str(n * 100 + i) for i in range(20)] for n in range(3 * NUM_PROCESSES)]
