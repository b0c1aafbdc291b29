"""What decode steps take beside each other: loads change all alike, and a trial tells of one."""

import pytest

from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import FULL, GREEDY
from jaxspec.scheduler.step_seconds import DecodeSeconds


def program(drafts, steps=1, features=GREEDY):
    return Program(64, 0, features, steps, drafts)


def note(times, drafts, seconds, *, rows=8, is_trial=False, count=1, steps=1):
    for _ in range(count):
        times.note(program(drafts, steps), rows, seconds, is_trial=is_trial)


def known(seconds, *, rows=8):
    """Times that were seen often, by the number of drafts."""
    times = DecodeSeconds()
    for drafts, each in seconds.items():
        note(times, drafts, each, rows=rows, is_trial=True, count=10)
    return times


def beside(times, *counts, rows=8, steps=1):
    found = times.beside(GREEDY, rows, 64, counts, steps)
    return [found.get(count) for count in counts]


def test_what_was_never_timed_is_not_known():
    assert beside(DecodeSeconds(), 0, 3) == [None, None]
    assert beside(known({3: 12.0}), 1, 3) == [None, 12.0]


def test_a_guess_serves_by_its_ratio_to_another_one():
    """A step without rows reads no experts: all guesses are too short alike."""
    times = DecodeSeconds()
    for drafts, seconds in ((0, 1.0), (1, 1.5), (3, 2.0)):
        times.guess(program(drafts), seconds)
    assert beside(times, 0, 1, 3) == [1.0, 1.5, 2.0]
    note(times, 3, 20.0)
    assert beside(times, 0, 1, 3) == [10.0, 15.0, 20.0]
    note(times, 1, 12.0, is_trial=True)
    assert beside(times, 1, 3) == [12.0, 20.0]
    times.guess(program(3), 99.0)
    assert beside(times, 3) == [20.0]


def test_each_power_of_two_of_the_rows_has_its_times_and_helps_the_others():
    times = known({0: 5.0, 3: 15.0})
    note(times, 3, 30.0, rows=64)
    assert beside(times, 0, 3, rows=64) == [10.0, 30.0]
    assert beside(times, 0, 3, rows=5) == [5.0, 15.0]
    assert beside(times, 0, 3, rows=9) == [5.0, 15.0]  # the nearest


def test_a_trial_tells_of_itself_alone():
    times = known({0: 5.0, 3: 10.0})
    note(times, 0, 6.0, is_trial=True)
    assert beside(times, 0, 3) == pytest.approx([5.25, 10.0])


def test_what_runs_tells_how_the_load_has_changed():
    times = known({0: 5.0, 3: 10.0})
    note(times, 3, 20.0, count=100)
    assert beside(times, 0, 3) == pytest.approx([10.0, 20.0])


def test_the_first_steps_tell_of_themselves_by_their_mean():
    times = known({0: 5.0})
    for seconds in (9.0, 12.0, 9.0):
        note(times, 3, seconds)
    assert beside(times, 0, 3) == pytest.approx([5.0, 10.0])


def test_a_step_that_hung_moves_little():
    times = known({3: 10.0})
    note(times, 3, 10**6)
    assert beside(times, 3) == pytest.approx([12.5])


def test_programs_of_several_steps_have_times_of_their_own():
    """What a dispatch costs besides is shared by its steps."""
    times = known({3: 11.0})
    note(times, 3, 9.0, steps=4)
    assert (beside(times, 3), beside(times, 3, steps=4)) == ([11.0], [9.0])


def test_what_is_sampled_has_times_of_its_own_and_helps_where_they_lack():
    """A search for top-p takes longer the more places are verified."""
    times = known({0: 5.0, 3: 10.0})
    times.note(program(3, features=FULL), 8, 20.0, is_trial=False)
    assert beside(times, 3) == [10.0]
    assert times.beside(FULL, 8, 64, (0, 3), 1) == {0: 10.0, 3: 20.0}
