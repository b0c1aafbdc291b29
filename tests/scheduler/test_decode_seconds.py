"""What decode steps take beside each other: loads change all alike, and a trial tells of one."""

import pytest

from jaxspec.plan import Program
from jaxspec.sampler import GREEDY
from jaxspec.scheduler.decode_seconds import DecodeSeconds


def program(drafts, *, rows=8, steps=1):
    return Program(rows, 0, GREEDY, steps, drafts)


def known(**seconds):
    """Times that were guessed and then seen once: `d3=12` is a step with three drafts."""
    times = DecodeSeconds()
    for name, value in seconds.items():
        times.guess(program(int(name[1:])), 99.0)
        times.note(program(int(name[1:])), value)
    return times


def of(times, drafts, *, rows=8, steps=1):
    return times.of(rows, drafts, steps)


def test_what_was_never_timed_is_not_known():
    assert of(known(d3=12.0), 1) is None


def test_the_first_step_that_is_seen_replaces_a_guess_and_moves_the_others():
    """A step without rows reads no experts: all guesses are too short alike."""
    times = DecodeSeconds()
    for drafts, seconds in ((0, 1.0), (1, 1.5), (3, 2.0)):
        times.guess(program(drafts), seconds)
    times.guess(program(3, rows=64), 2.0)
    times.note(program(3), 20.0)
    assert [of(times, drafts) for drafts in (0, 1, 3)] == [10.0, 15.0, 20.0]
    assert of(times, 3, rows=64) == 2.0
    times.note(program(1), 12.0)
    assert [of(times, drafts) for drafts in (0, 1, 3)] == [10.0, 12.0, 20.0]


def test_a_program_that_has_just_begun_tells_of_itself_alone():
    times = known(d0=5.0, d3=10.0)
    times.note(program(0), 6.0)
    assert of(times, 0) == pytest.approx(5.25)
    assert of(times, 3) == 10.0


def test_a_program_that_has_run_for_a_while_tells_how_the_load_has_changed():
    times = known(d0=5.0, d3=10.0)
    for _ in range(200):
        times.note(program(3), 10.0)
    for _ in range(100):
        times.note(program(3), 20.0)
    assert of(times, 3) == pytest.approx(20.0)
    assert of(times, 0) == pytest.approx(10.0)


def test_a_step_that_hung_moves_little():
    times = known(d3=10.0)
    times.note(program(3), 10**6)
    assert of(times, 3) == pytest.approx(12.5)


def test_programs_of_several_steps_have_times_of_their_own():
    """What a dispatch costs besides is shared by its steps."""
    times = DecodeSeconds()
    times.guess(program(3), 10.0)
    times.guess(program(3, steps=4), 8.0)
    times.note(program(3, steps=4), 9.0)
    times.note(program(3), 11.0)
    assert (of(times, 3), of(times, 3, steps=4)) == (11.0, 9.0)


def test_a_guess_behind_what_was_seen_changes_nothing():
    times = known(d3=10.0)
    times.guess(program(3), 1.0)
    assert of(times, 3) == 10.0
