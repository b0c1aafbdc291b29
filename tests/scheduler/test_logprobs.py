"""Reports find their requests: by row and place, and by index in the prompt."""

import dataclasses
import types

import numpy as np
import pytest

from jaxspec.plan.plan import Program, StepOutput, StepPlan
from jaxspec.requests.logprobs import LAYOUT
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_features import LOGPROBS, PROMPT_LOGPROBS, SamplingFeatures
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.scheduler.packing import record_logprobs
from jaxspec.scheduler.scheduled_step import Entry, ScheduledStep

ROWS, WIDTH, STEPS = 2, 3, 2
ASKED = SamplingParams(logprobs=1, prompt_logprobs=1)


def request(length, params=ASKED, num_computed=0):
    made = Request(tuple(range(length)), params, seed=0)
    made.prefill_len, made.num_computed = length, num_computed
    return made


def number(rows):
    """What stands in the first field of each row."""
    return [None if row is None else int(row[0]) for row in rows]


def scheduled(decodes=(), prefills=()):
    program = Program(
        ROWS, 8 * bool(prefills), SamplingFeatures.of(LOGPROBS, PROMPT_LOGPROBS), STEPS
    )
    plan = StepPlan(program, np.zeros(0, np.int32))
    return ScheduledStep(plan, tuple(decodes), tuple(prefills), 0)


def emitted(num_rows, tokens):
    """An output with `tokens` by (step, row); the place (s, r, j) reports 100 s + 10 r + j."""
    ids = np.full((STEPS, num_rows, WIDTH), -1)
    for (step, row), some in tokens.items():
        ids[step, row, : len(some)] = some
    steps, rows, places = np.indices(ids.shape)
    reported = np.zeros((*ids.shape, LAYOUT.size), np.int32)
    reported[..., 0] = 100 * steps + 10 * rows + places
    return StepOutput(ids, *[np.zeros(ids.shape[:2])] * 4, ids[:, :, 1:], logprobs=reported)


def of_prompt(count):
    reported = np.zeros((1, count, LAYOUT.size), np.int32)
    reported[0, :, 0] = np.arange(count)
    nothing = np.zeros((1, ROWS + 2))
    ids = np.full((1, ROWS + 2, WIDTH), -1)
    return StepOutput(ids, *[nothing] * 4, ids[:, :, 1:], prompt_logprobs=reported)


def test_each_emitted_token_gets_the_report_of_its_place():
    one, silent = request(2), request(2, SamplingParams())
    step = scheduled([Entry.in_flight(one, STEPS, 6), Entry.in_flight(silent, STEPS, 6)])
    tokens = {(0, 0): [7, 8], (1, 0): [9], (0, 1): [1], (1, 1): [2]}
    record_logprobs(step, emitted(ROWS, tokens))
    assert number(one.logprobs) == [0, 1, 100]
    assert silent.logprobs == []


def test_the_end_of_a_prompt_is_behind_the_rows_that_decode():
    one = request(4, num_computed=4)
    step = scheduled(prefills=[Entry.in_flight(one, 1, 1, 4)])
    record_logprobs(step, emitted(ROWS + 2, {(0, ROWS): [5]}))
    assert number(one.logprobs) == [20]


def test_a_chunk_tells_of_the_tokens_behind_its_own():
    """Of two prompts, one from its beginning and one from its fourth token on."""
    first, second = request(6, num_computed=3), request(8, num_computed=8)
    entries = [Entry.in_flight(first, 0, 0, 3), Entry.in_flight(second, 1, 1, 4)]
    record_logprobs(scheduled(prefills=entries), of_prompt(8))
    assert number(first.prompt_logprobs) == [None, 0, 1, 2, None, None]
    # What follows the prompt's last token is no prompt token.
    assert number(second.prompt_logprobs) == [None] * 5 + [3, 4, 5]


def test_a_prompt_read_again_with_its_output_is_reported_once():
    again = request(4)
    again.tokens += [9, 9, 9]
    for start, stop in [(0, 5), (5, 7)]:
        again.num_computed = stop
        entry = Entry.in_flight(again, 0, 0, stop - start)
        record_logprobs(scheduled(prefills=[entry]), of_prompt(8))
    assert number(again.prompt_logprobs) == [None, 0, 1, 2]


def ended(entry):
    entry.request.finish = Finish.ABORT


def returned(entry):
    entry.request.generation += 1


@pytest.mark.parametrize("change", [ended, returned])
def test_late_reports_are_nobody_s(change):
    one = request(4, num_computed=4)
    entry = Entry.in_flight(one, 1, 1, 4)
    change(entry)
    step = scheduled(prefills=[entry])
    record_logprobs(step, emitted(ROWS + 2, {(0, ROWS): [5]}))
    record_logprobs(step, of_prompt(8))
    assert not one.logprobs and number(one.prompt_logprobs) == [None] * 4


def test_what_is_kept_does_not_hold_the_step_s_arrays():
    one = request(4, num_computed=4)
    step = scheduled(prefills=[Entry.in_flight(one, 1, 1, 4)])
    outputs = emitted(ROWS + 2, {(0, ROWS): [5]}), of_prompt(8)
    for output in outputs:
        record_logprobs(step, output)
    reported = outputs[0].logprobs, outputs[1].prompt_logprobs
    for row in (*one.logprobs, *one.prompt_logprobs[1:]):
        assert not any(np.shares_memory(row, each) for each in reported)


def test_programs_that_report_nothing_cost_nothing():
    step = types.SimpleNamespace()  # not even looked at
    output = dataclasses.replace(of_prompt(8), prompt_logprobs=None)
    record_logprobs(step, output)
