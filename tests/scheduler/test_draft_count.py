"""The number of drafts that gives the most tokens a second, found from what steps give and take."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.config import StepShapes
from jaxspec.plan import Program, RowOutput, StepPlan
from jaxspec.sampler import GREEDY
from jaxspec.scheduler.decode_seconds import DecodeSeconds
from jaxspec.scheduler.draft_count import DraftCount
from jaxspec.scheduler.scheduled_step import Entry, NextStep, ScheduledStep

GOOD, POOR = (0.8, 0.6, 0.45), (0.4, 0.15, 0.05)
SHAPES = StepShapes.of(
    max_num_seqs=64,
    max_model_len=512,
    page_size=16,
    num_pages=None,
    draft_counts=(0, 1, 3),
    decode_rows=(1, 64),
    prefill_tokens=None,
    max_num_batched_tokens=None,
    max_prefill_seqs=None,
)
# Milliseconds of a step with 0, 1 and 3 drafts: few rows, many rows, and a mixture of experts.
FEW_ROWS, MANY_ROWS, EXPERTS = (4.2, 4.8, 6.2), (4.2, 6.0, 10.8), (5.5, 8.4, 13.0)


class Device:
    """Runs what is chosen, and tells of it two dispatches late."""

    def __init__(self, milliseconds, rates, *, num_rows=1, num_steps=1, noise=0.03):
        self.seconds = DecodeSeconds()
        self.chooser = DraftCount(SHAPES, self.seconds)
        self.milliseconds = dict(zip((0, 1, 3), milliseconds, strict=True))
        self.rates, self.num_rows, self.num_steps = rates, num_rows, num_steps
        self.noise, self.load = noise, 1.0  # of the times that are told; what they all grow by
        self.rng, self.late = np.random.default_rng(0), []
        self.tokens = self.time = 0.0
        self.counts = []
        for drafts in SHAPES.draft_counts:
            self.seconds.guess(self.program(drafts), self.milliseconds[drafts] / 1000)

    def program(self, drafts):
        rows, tokens, drafts = SHAPES.round_up(self.num_rows, 0, drafts)
        return Program(rows, tokens, GREEDY, self.num_steps, drafts)

    def run(self, num_dispatches, most=15):
        for _ in range(num_dispatches):
            rows = [SimpleNamespace(max_drafts=most)] * self.num_rows
            step = NextStep(0, self.num_steps, decodes=rows)
            (_, _, count), known = self.chooser.dispatch(step, 0)
            self.counts.append(count)
            self.give(count, known)
        return self

    def give(self, count, known):
        accepted, emitted = np.zeros((self.num_rows, 3), int), np.zeros(self.num_rows, int)
        for step in range(self.num_steps):
            has = count if step else min(count, known)
            conditional = np.divide(self.rates, (1, *self.rates[:-1]))[:has]
            stands = self.rng.random((self.num_rows, has)) < conditional
            stood = np.cumprod(stands, axis=1)
            accepted[:, :has] += stood
            emitted += 1 + stood.sum(axis=1)
            self.tokens += self.num_rows + stood.sum()
            self.time += self.load * self.milliseconds[count]
        plan = StepPlan(self.program(count), np.zeros(0, np.int32))
        entries = (Entry(None, 0, 1),) * self.num_rows
        given = [
            RowOutput((1,) * n, (), 0, [], row)
            for n, row in zip(emitted, accepted.tolist(), strict=True)
        ]
        self.late.append((ScheduledStep(plan, entries, (), 0, known), given))
        if len(self.late) > 2:
            step, given = self.late.pop(0)
            self.chooser.note(step, given)
            milliseconds = self.load * self.milliseconds[step.plan.program.num_drafts]
            milliseconds *= 1 + self.noise * self.rng.standard_normal()
            self.seconds.note(step.plan.program, milliseconds / 1000)

    def speed_of(self, count):
        return (1 + sum(self.rates[:count])) / self.milliseconds[count] * self.num_rows


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("rates", [GOOD, POOR, (0.02, 0.01, 0.005)], ids=["good", "poor", "none"])
@pytest.mark.parametrize("times", [FEW_ROWS, MANY_ROWS, EXPERTS], ids=["few", "many", "experts"])
def test_it_comes_within_2_percent_of_the_best_fixed_number(times, rates, num_rows, num_steps):
    """So speculation is never more than 2% slower than none; the first tokens are not counted."""
    device = Device(times, rates, num_rows=num_rows, num_steps=num_steps).run(1000 // num_steps)
    device.tokens = device.time = 0.0
    device.run(8000 // num_steps)
    best = max(device.speed_of(count) for count in (0, 1, 3))
    noise = 0.01 if num_rows == 1 else 0.002
    assert device.tokens / device.time > (0.98 - noise) * best


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


def test_a_load_that_comes_and_goes_says_nothing_of_the_number():
    """Where rows end, a mixture of experts reads fewer of them, whatever the number of drafts."""
    device = Device(EXPERTS, GOOD, num_rows=64)
    device.run(500)
    device.tokens = device.time = 0.0
    for burst in range(100):
        device.load = 1.0 if burst % 2 == 0 else 0.3
        device.run(60 if burst % 2 == 0 else 10)
    everywhere = 50 * (60 + 0.3 * 10) * EXPERTS[2]  # milliseconds, had all steps three drafts
    best = 50 * 70 * 64 * (1 + sum(GOOD)) / everywhere
    assert device.tokens / device.time > 0.975 * best


@pytest.mark.parametrize("guesses", [(1.0, 1.1, 1.3), (30.0, 20.0, 10.0)], ids=["short", "wrong"])
def test_guesses_cost_few_steps(guesses):
    """They come from steps without rows, which read no expert."""
    device = Device(EXPERTS, GOOD, num_rows=64)
    device.seconds = DecodeSeconds()
    device.chooser = DraftCount(SHAPES, device.seconds)
    for drafts, milliseconds in zip(SHAPES.draft_counts, guesses, strict=True):
        device.seconds.guess(device.program(drafts), milliseconds / 1000)
    assert np.mean(np.array(device.run(120).counts) == 3) > 0.8


def test_no_row_is_given_many_more_drafts_than_one_of_them_wants():
    device = Device(FEW_ROWS, GOOD)
    assert set(device.run(200, most=0).counts) == {0}
    assert set(device.run(200, most=1).counts[200:]) <= {0, 1}
    assert 3 in device.run(200, most=2).counts[400:]


def test_a_program_that_was_never_timed_is_tried():
    assert DraftCount(SHAPES, DecodeSeconds()).choose(1, 1, 15) == 3


def test_one_number_needs_no_choice():
    shapes = StepShapes(
        max_num_seqs=2, max_model_len=64, page_size=8, num_pages=20, num_drafts=2,
        decode_rows=(2,), prefill_tokens=(64,),
    )  # fmt: skip
    assert DraftCount(shapes, DecodeSeconds()).choose(2, 1, 0) == 2
