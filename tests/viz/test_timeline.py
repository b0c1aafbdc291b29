"""A timeline says for each step when the host and the device had it, from one origin."""

import pytest

from jaxspec.engine.engine import StepTimes
from jaxspec.plan.plan import MOVES, Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.viz.timeline import STAGES, rows_of


def step(start, device_end, *, prompt_tokens=0, num_steps=1):
    """Planned and dispatched in 1 and 2 seconds from `start`, collected in 1 second."""
    end = start + 20 if device_end is None else device_end
    program = Program(4, prompt_tokens, GREEDY, num_steps) if num_steps else MOVES
    return StepTimes(program, 4, prompt_tokens, start, start + 1, start + 3, start + 3, end,
                     end + 1, device_end)  # fmt: skip


def spans(row, stage):
    return [(span.start, span.end, span.is_certain) for span in row.spans if span.stage == stage]


def test_times_are_since_the_first_step_shown_was_planned():
    first, second = rows_of([step(100, 120), step(104, 130)])
    assert spans(first, "plan") == [(0, 1, True)] and spans(second, "plan") == [(4, 5, True)]
    assert spans(first, "collect") == [(20, 21, True)] and spans(first, "wait") == [(3, 20, True)]


def test_the_device_has_one_step_at_a_time_and_its_spans_join():
    first, second = rows_of([step(100, 120), step(104, 130)])
    assert spans(first, "device") == [(1, 3, False), (3, 20, True)]
    assert spans(second, "device") == [(20, 20, False), (20, 30, True)]


def test_a_window_is_that_part_of_the_whole():
    steps = [step(100 + 4 * i, 120 + 10 * i, prompt_tokens=64 * (i == 0)) for i in range(5)]
    whole, part = rows_of(steps), rows_of(steps, first=2, count=2)
    assert [row.name for row in part] == [row.name for row in whole[2:4]]
    shift = 8
    assert [(s.start + shift, s.end + shift) for row in part for s in row.spans] == [
        (s.start, s.end) for row in whole[2:4] for s in row.spans
    ]
    assert rows_of(steps, first=5) == rows_of([]) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ({}, "step 7"),
        ({"prompt_tokens": 64}, "step 7 (prompt)"),
        ({"num_steps": 4}, "step 7 (4 steps)"),
        ({"num_steps": 0}, "step 7 (copies)"),
    ],
)
def test_a_row_is_named_by_its_number_and_kind(kind, name):
    assert rows_of([step(0, 20, **kind)], num_before=7)[0].name == name


def test_what_nobody_watched_has_no_device_and_every_stage_has_a_colour():
    (row,) = rows_of([step(0, None)])
    assert spans(row, "device") == [] and {span.stage for span in row.spans} < STAGES.keys()
