"""The number of drafts that gives the most tokens a second, found from what steps give and take."""

from types import SimpleNamespace

import numpy as np
import pytest
from pairwise import crossed

from jaxspec.plan.plan import Program, RowOutput, StepPlan
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.scheduler.adaptive_drafts import AdaptiveDrafts
from jaxspec.scheduler.ready_programs import ReadyPrograms, StepNeeds
from jaxspec.scheduler.scheduled_step import Entry, ScheduledStep, StepBuilder
from jaxspec.scheduler.step_seconds import DecodeSeconds

GOOD, POOR = (0.8, 0.6, 0.45), (0.4, 0.15, 0.05)
SHAPES = StepShapes(
    max_num_seqs=64,
    max_model_len=512,
    page_size=16,
    num_pages=2049,
    num_drafts=3,
    draft_buckets=(0, 1, 3),
    decode_rows=(1, 64),
    prefill_tokens=(64, 512),
)
# Milliseconds of a step with 0, 1 and 3 drafts: few rows, many rows, and a mixture of experts.
FEW_ROWS, MANY_ROWS, EXPERTS = (4.2, 4.8, 6.2), (4.2, 6.0, 10.8), (5.5, 8.4, 13.0)


def chooser(shapes):
    return AdaptiveDrafts(shapes, DecodeSeconds(), ReadyPrograms(shapes))


class Device:
    """Runs what is chosen, and tells of it two dispatches late."""

    def __init__(self, milliseconds, rates, *, num_rows=1, num_steps=1, guesses=None):
        self.seconds = DecodeSeconds()
        self.chooser = AdaptiveDrafts(SHAPES, self.seconds, ReadyPrograms(SHAPES))
        self.milliseconds = dict(zip((0, 1, 3), milliseconds, strict=True))
        self.rates, self.num_rows, self.num_steps = rates, num_rows, num_steps
        self.load = 1.0  # what all times grow by
        self.rng, self.late = np.random.default_rng(0), []
        self.counts = []
        self.start_counting()
        for drafts, each in zip((0, 1, 3), guesses or milliseconds, strict=True):
            self.seconds.guess(self.program(drafts), each / 1000)

    def start_counting(self):
        self.tokens = self.time = self.best_time = 0.0

    def program(self, drafts):
        rows, tokens, drafts = SHAPES.round_up(self.num_rows, 0, drafts)
        return Program(rows, tokens, GREEDY, self.num_steps, drafts)

    def run(self, num_dispatches, most=15):
        for _ in range(num_dispatches):
            rows = [SimpleNamespace(max_drafts=most)] * self.num_rows
            step = StepBuilder(0, self.num_steps, decodes=rows)
            needs = StepNeeds(self.num_rows, 0, GREEDY, self.num_steps)
            program, choice = self.chooser.choose_program(step, needs)
            count = program.num_drafts
            self.counts.append(count)
            self.give(count, choice)
        return self

    def milliseconds_of(self, count):
        return self.load * self.milliseconds[count]

    def give(self, count, choice):
        accepted, emitted = np.zeros((self.num_rows, 3), int), np.zeros(self.num_rows, int)
        for step in range(self.num_steps):
            has = count if step else min(count, choice.num_known)
            conditional = np.divide(self.rates, (1, *self.rates[:-1]))[:has]
            stands = self.rng.random((self.num_rows, has)) < conditional
            stood = np.cumprod(stands, axis=1)
            accepted[:, :has] += stood
            emitted += 1 + stood.sum(axis=1)
            given = self.num_rows + stood.sum()
            self.tokens += given
            self.time += self.milliseconds_of(count)
            self.best_time += given / max(map(self.speed_of, (0, 1, 3)))
        plan = StepPlan(self.program(count), np.zeros(0, np.int32))
        entries = (Entry(None, 0, 1),) * self.num_rows
        given = [
            RowOutput((1,) * n, (), 0, [], row)
            for n, row in zip(emitted, accepted.tolist(), strict=True)
        ]
        step = ScheduledStep(plan, entries, (), 0, choice)
        noise = 1 + 0.03 * self.rng.standard_normal()
        self.late.append((step, given, noise * self.milliseconds_of(count) / 1000))
        if len(self.late) > 2:
            step, given, seconds = self.late.pop(0)
            self.chooser.note(step, given)
            program, rows = step.plan.program, len(step.decodes)
            self.seconds.note(program, rows, seconds, is_trial=step.drafts.is_trial)

    def speed_of(self, count):
        return (1 + sum(self.rates[:count])) / self.milliseconds_of(count) * self.num_rows


class Experts(Device):
    """A mixture of experts, of which a step reads those that its rows chose: as measured."""

    def milliseconds_of(self, count):
        """With 1, 8 and 64 rows 0 drafts took 2.5, 5.6 and 16.5 ms, and 3 drafts 4.5, 13.1, 24.2"""
        few = np.interp(np.log2(self.num_rows), (0, 3, 6), (2.5, 5.6, 16.5))
        many = np.interp(np.log2(self.num_rows), (0, 3, 6), (4.5, 13.1, 24.2))
        one = np.interp(np.log2(self.num_rows), (0, 3, 6), (3.2, 8.9, 20.8))
        return {0: few, 1: one, 3: many}[count]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "times, rates, num_rows, num_steps",
    crossed((FEW_ROWS, MANY_ROWS, EXPERTS), (GOOD, POOR, (0.02, 0.01, 0.005)), (1, 64), (1, 4)),
)
def test_it_comes_within_2_percent_of_the_best_fixed_number(times, rates, num_rows, num_steps):
    """So speculation is never more than 2% slower than none; the first tokens are not counted."""
    device = Device(times, rates, num_rows=num_rows, num_steps=num_steps).run(1000 // num_steps)
    device.start_counting()
    device.run(8000 // num_steps)
    noise = 0.01 if num_rows == 1 else 0.002
    assert device.best_time > (0.98 - noise) * device.time


@pytest.mark.few(1)
@pytest.mark.parametrize("num_steps", [1, 4, 8])
def test_it_follows_texts_that_become_easier_and_harder(num_steps):
    device = Device(FEW_ROWS, POOR, num_steps=num_steps).run(2000 // num_steps)
    newest = slice(-400 // num_steps, None)
    assert np.mean(device.counts[newest]) < 1.2
    device.rates = 0.02, 0.01, 0.005
    assert np.mean(device.run(3000 // num_steps).counts[newest]) < 0.5
    device.rates = GOOD
    assert np.mean(device.run(6000 // num_steps).counts[newest]) > 2.5
    device.rates = POOR
    assert np.mean(device.run(3000 // num_steps).counts[newest]) < 1.2


def test_a_number_that_was_slow_once_is_timed_again():
    """With half of the work a row it pays to draft none, where it had paid to draft three."""
    device = Device((10.0, 10.5, 11.0), POOR).run(1000)
    assert np.mean(device.counts[-300:]) > 2
    device.milliseconds = {0: 4.0, 1: 6.0, 3: 9.0}
    assert np.mean(device.run(3000).counts[-300:]) < 1.5


@pytest.mark.parametrize("rates", [GOOD, POOR], ids=["good", "poor"])
@pytest.mark.parametrize("most_rows", [8, 64])
def test_batches_whose_rows_end_one_by_one_teach_each_number_of_rows(most_rows, rates):
    """The first batches are for learning."""
    device = Experts((1, 1.1, 1.3), rates)
    for batch in range(40):
        if batch == 10:
            device.start_counting()
        for rows, dispatches in ((most_rows, 60), (most_rows // 2, 10), (most_rows // 4, 5)):
            device.num_rows = rows
            device.run(dispatches)
    assert device.best_time > 0.97 * device.time


def test_what_is_best_for_one_row_does_not_stay_for_eight():
    """With poor drafts one row wants one draft and eight rows none: as measured with experts."""
    device = Experts((1, 1.1, 1.3), POOR).run(400)
    device.num_rows = 8
    assert device.run(150).counts[-50:].count(0) > 45
    device.start_counting()
    device.run(300)
    assert device.best_time > 0.98 * device.time


def test_a_trial_that_nobody_saw_is_not_made_again_and_again():
    """Where a step takes less than the host, the host never waits for one, and knows no time."""
    device = Device(FEW_ROWS, GOOD)
    note = device.seconds.note

    def seen(program, num_rows, seconds, **told):
        if program.num_drafts == 3:
            note(program, num_rows, seconds, **told)

    device.seconds.note = seen
    counts = device.run(2000).counts
    assert np.mean(np.array(counts) == 3) > 0.93


def test_a_load_that_comes_and_goes_says_nothing_of_the_number():
    """Texts of another length take longer, with any number of drafts."""
    device = Device(EXPERTS, GOOD, num_rows=64).run(500)
    device.start_counting()
    for burst in range(100):
        device.load = (1.0, 0.7)[burst % 2]
        device.run((60, 10)[burst % 2])
    assert device.best_time > 0.98 * device.time


@pytest.mark.parametrize("guesses", [(1.0, 1.1, 1.3), (30.0, 20.0, 10.0)], ids=["short", "wrong"])
def test_guesses_cost_few_steps(guesses):
    """They come from steps without rows, which read no expert."""
    device = Device(EXPERTS, GOOD, num_rows=64, guesses=guesses)
    assert np.mean(np.array(device.run(120).counts) == 3) > 0.8


def test_no_row_is_given_many_more_drafts_than_one_of_them_wants():
    device = Device(FEW_ROWS, GOOD)
    assert set(device.run(200, most=0).counts) == {0}
    assert set(device.run(200, most=1).counts[200:]) <= {0, 1}
    assert 3 in device.run(200, most=2).counts[400:]


def test_a_program_that_was_never_timed_is_tried():
    assert chooser(SHAPES).choose(StepNeeds(1, 0, GREEDY), 15) == 3


def test_one_number_needs_no_choice():
    shapes = StepShapes(
        max_num_seqs=2, max_model_len=64, page_size=8, num_pages=20, num_drafts=2,
        decode_rows=(2,), prefill_tokens=(64,),
    )  # fmt: skip
    assert chooser(shapes).choose(StepNeeds(2, 0, GREEDY), 0) == 2
