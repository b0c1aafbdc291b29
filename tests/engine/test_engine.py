import dataclasses
from collections import deque

import numpy as np
import pytest
from clock import set_clock

from jaxspec.engine import engine as engine_module
from jaxspec.engine.engine import Engine
from jaxspec.plan.plan import ForwardPass, StepOutput, plan_layout
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.scheduler.request_observer import RequestObserver
from jaxspec.scheduler.scheduler import Scheduler

BUCKETS = StepShapes(
    max_num_seqs=2,
    max_model_len=64,
    page_size=16,
    num_pages=9,
    num_drafts=0,
    decode_rows=(2,),
    prefill_tokens=(8,),
)


class FakeRunner:
    """Emits token 5 for every row, and notes the order of dispatches and results."""

    def __init__(self, shapes=BUCKETS, on_collect=lambda number: None):
        self.shapes, self.on_collect = shapes, on_collect
        self.log = []
        self.in_flight = deque()
        self.num_tokens = {}

    def dispatch(self, plan):
        number = sum(kind == "dispatch" for kind, _ in self.log)
        if isinstance(plan.program, ForwardPass):
            self.log.append(("forward", number))
            return None  # not collected
        self.log.append(("dispatch", number))
        values = plan_layout(plan.program, self.shapes).unpack(plan.packed)
        lens = values["prefill_lens"]
        rows = plan.program.decode_rows
        tokens = np.full((plan.num_steps, rows + len(lens), 1), -1, np.int32)
        tokens[:, : int(values["num_decode"])] = 5
        tokens[:, rows:][:, lens > 0] = 5
        self.in_flight.append(number)
        return FakePending(self, number, tokens)

    @property
    def max_lead(self):
        """Most dispatched steps without a result, and the lead after each collection."""
        lead, leads = 0, [0]
        for kind, _ in self.log:
            lead += 1 if kind == "dispatch" else -1
            leads.append(lead)
        return max(leads)


class FakePending:
    def __init__(self, runner, number, tokens):
        self.runner, self.number, self.tokens = runner, number, tokens

    def result(self):
        assert self.runner.in_flight.popleft() == self.number, "collected out of order"
        self.runner.log.append(("collect", self.number))
        self.runner.on_collect(self.number)
        zeros = np.zeros(self.tokens.shape[:2], np.int32)
        # The host itself must end nothing: finish is the device's word, here the last step's.
        finish = np.where(self.number >= 7, Finish.LENGTH, 0).astype(np.int32) + zeros
        no_drafts = np.zeros((*zeros.shape, 0), np.int32)
        return StepOutput(self.tokens, zeros, zeros, finish, zeros, no_drafts)

    def done_time(self):
        return 100.0 + self.number


def make_engine(depth):
    runner = FakeRunner()
    engine = Engine(Scheduler(BUCKETS, SchedulerLimits()), runner, max_in_flight=depth)
    request = Request((1, 2, 3), SamplingParams(max_tokens=8), seed=0)
    engine.scheduler.add([request])
    return engine, runner, request


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 20])
def test_steps_are_collected_in_order_and_the_lead_is_depth_plus_one(depth):
    engine, runner, request = make_engine(depth)
    progress = []
    while engine.has_work:
        progress += engine.step()
        assert len(runner.in_flight) <= depth
    assert request.output == [5] * 8 == [t for p in progress for t in p.given.tokens]
    assert request.finish == Finish.LENGTH
    assert runner.max_lead == min(depth + 1, 8)
    # Step n is collected right after step n + depth is dispatched, or when nothing is left to.
    expected = []
    for number in range(8 + depth):
        expected += [("dispatch", number)] * (number < 8)
        expected += [("collect", number - depth)] * (0 <= number - depth < 8)
    assert runner.log == expected
    assert engine.metrics.num_steps == 8


class Filter:
    """Masks of the host, which note the output that they are made for."""

    def __init__(self):
        self.outputs = []

    def limit(self, mask, prompt, output, drafts):
        self.outputs.append(list(output))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_masks_follow_all_tokens_while_the_device_runs_the_forward_pass(depth):
    engine, runner, request = make_engine(depth)
    request.token_filter = Filter()
    while engine.has_work:
        engine.step()
    assert request.token_filter.outputs == [[5] * count for count in range(8)]
    expected = [("dispatch", 0)]
    for number in range(1, 8):
        if depth:
            expected += [("forward", number), ("collect", number - 1), ("dispatch", number)]
        else:
            expected += [("collect", number - 1), ("dispatch", number)]
    assert runner.log == [*expected, ("collect", 7)]


def test_stats_are_of_the_engines_whole_life_and_of_its_own_seconds(monkeypatch):
    engine, _, request = make_engine(2)
    assert engine.stats()["tokens_per_second"] == engine.stats()["rounds_per_second"] == 0
    collect = engine.scheduler.collect

    def with_drafts(step, output):
        return [
            progress._replace(given=progress.given._replace(drafted=[1, 1, 0], accepted=[1, 0, 0]))
            for progress in collect(step, output)
        ]

    monkeypatch.setattr(engine.scheduler, "collect", with_drafts)
    while engine.has_work:
        engine.step()
    engine.scheduler.add([Request((1, 2, 3), SamplingParams(max_tokens=1), seed=1)])
    while engine.has_work:
        engine.step()
    figures, counts = engine.stats(), engine.acceptance
    assert counts.drafted_per_position == [9, 9, 0] and counts.accepted_per_position == [9, 0, 0]
    assert (figures["num_tokens"], figures["num_rounds"]) == (9, 9)
    seconds = sum(figures[f"{part}_time"] for part in ("plan", "dispatch", "wait", "collect"))
    assert figures["tokens_per_second"] == figures["rounds_per_second"] == 9 / seconds


def test_depth_zero_collects_each_step_before_the_next():
    engine, runner, _ = make_engine(0)
    while engine.has_work:
        engine.step()
    assert [kind for kind, _ in runner.log] == ["dispatch", "collect"] * 8


@pytest.mark.parametrize("depth", [0, 2])
def test_a_trace_says_when_each_step_was_planned_dispatched_and_collected(depth):
    engine, _, _ = make_engine(depth)
    engine.step()
    engine.trace = steps = []
    while engine.has_work:
        engine.step()
    engine.trace = None
    assert len(steps) == (8 if depth else 7)  # those collected since
    for step in steps:
        assert step.plan_start <= step.dispatch_start <= step.dispatch_end <= step.wait_start
        assert step.wait_start <= step.collect_start <= step.collect_end
        assert step.program.decode_rows == 2
    assert [step.device_end for step in steps] == [100.0 + n for n in range(8 - len(steps), 8)]
    overlaps = [b.plan_start < a.wait_start for a, b in zip(steps, steps[1:], strict=False)]
    assert all(overlaps) if depth else not any(overlaps)


@pytest.mark.parametrize(("depth", "lead"), [(0, 1), (1, 2), (2, 2), (5, 3)])
def test_several_steps_at_once_count_as_many_in_flight(depth, lead):
    """Four steps behind four are enough for the host; a prompt that comes waits for them all."""
    shapes = dataclasses.replace(BUCKETS, steps_per_dispatch=4, max_model_len=200, num_pages=201)
    runner = FakeRunner(shapes)
    engine = Engine(Scheduler(shapes, SchedulerLimits()), runner, max_in_flight=depth)
    engine.scheduler.add([Request((1, 2, 3), SamplingParams(max_tokens=100), seed=0)])
    for _ in range(12):
        engine.step()
    assert runner.max_lead == lead


class Clock:
    """Seconds that pass as a test says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        set_clock(monkeypatch, engine_module, perf_counter=lambda: self.now)


@pytest.mark.parametrize(
    ("waits", "noted"),
    [
        ((0.02, 0.02, 0.02), [0.02, 0.02]),  # of the first step nobody saw the beginning
        ((0.0, 0.02, 0.02), [0.02]),
        ((0.02, 0.0, 0.02), []),  # the host was late: the device may have waited for it
    ],
)
def test_the_engine_notes_what_a_step_took_where_it_saw_it_begin_and_end(waits, noted, monkeypatch):
    clock, heard = Clock(monkeypatch), []
    engine, runner, _ = make_engine(1)

    def wait(number):
        clock.now += dict(enumerate(waits)).get(number, 0.0)

    runner.on_collect = wait
    monkeypatch.setattr(
        engine.scheduler.step_seconds, "note_step", lambda step, seconds: heard.append(seconds)
    )
    while engine.has_work:
        engine.step()
    assert heard == pytest.approx(noted)


def test_drain_leaves_nothing_in_flight_and_what_ended_stays_ended():
    engine, runner, request = make_engine(3)
    for _ in range(5):
        engine.step()
    before = list(request.tokens)
    assert len(runner.in_flight) == 3
    engine.scheduler.end(request, Finish.ABORT)
    assert engine.has_work
    engine.drain()
    assert not runner.in_flight and not engine.has_work
    assert request.tokens == before and request.finish == Finish.ABORT


def test_who_follows_requests_adds_stats_and_is_closed_behind_the_runner():
    engine, closed = make_engine(1)[0], []
    assert "seen" not in engine.stats()
    observer = RequestObserver()
    observer.stats, observer.close = lambda: {"seen": 3}, lambda: closed.append("observer")
    engine.scheduler.observers = (observer,)
    engine.runner.close = lambda: closed.append("runner")
    assert engine.stats()["seen"] == 3
    engine.close()
    assert closed == ["runner", "observer"]


def test_an_engine_without_work_dispatches_nothing():
    runner = FakeRunner()
    engine = Engine(Scheduler(BUCKETS, SchedulerLimits()), runner)
    assert engine.step() == [] and not engine.has_work and not runner.log


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match="max_in_flight must be at least 0 .* got -1"):
        Engine(Scheduler(BUCKETS, SchedulerLimits()), FakeRunner(), max_in_flight=-1)
