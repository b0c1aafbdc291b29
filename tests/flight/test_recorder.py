"""What a recorder keeps of the steps that pass through it, and what it writes when one fails."""

import stat

import numpy as np
import pytest
from fake_device import make_buckets

from jaxspec.flight import recorder
from jaxspec.flight.file import read
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.plan import Program, StepOutput, StepPlan, pack_plan
from jaxspec.sampler import GREEDY

SHAPES = make_buckets(num_drafts=1)
PROGRAM = Program(5, 0, GREEDY)
ABOUT = {"vocab_size": 50}


class FakeRunner:
    """Answers a plan with tokens that count the plans."""

    def __init__(self):
        self.num_plans = self.num_resets = 0

    def dispatch(self, plan):
        if plan is None:
            raise RuntimeError("the device is gone")
        self.num_plans += 1
        return FakePending(self.num_plans)

    def reset(self):
        self.num_resets += 1


class FakePending:
    def __init__(self, number):
        self.number = number

    def result(self):
        counts = np.zeros((1, 5), np.int32)
        return StepOutput(np.full((1, 5, 2), self.number, np.int32), counts, counts, counts)

    def done_time(self):
        return self.number / 8


def make_plan(*prev_positions):
    values = {"prev_positions": prev_positions, "num_decode": len(prev_positions)}
    return StepPlan(PROGRAM, pack_plan(PROGRAM, SHAPES, values))


def make_recorder(**options):
    return FlightRecorder(FakeRunner(), SHAPES, ABOUT, **({"hashed": False} | options))


def saved(recorder, path):
    recorder.save(path)
    return read(path)


def test_plans_and_outputs_pass_through_and_come_back_from_a_file(tmp_path):
    each = make_recorder()
    plans = [make_plan(-1, -1), make_plan(0, 1), make_plan(1)]
    pending = [each.dispatch(plan) for plan in plans]
    assert pending[0].result().tokens[0, 0, 0] == 1 and pending[0].done_time() == 1 / 8
    assert pending[1].result().tokens[0, 0, 0] == 2  # the third stays in flight
    flight = saved(each, tmp_path / "a.npz")
    assert (flight.start, flight.failure, flight.hashed) == ("empty", None, False)
    for step, plan in zip(flight.steps, plans, strict=True):
        assert step.program == PROGRAM and np.array_equal(step.packed, plan.packed)
    outputs = [step.output and step.output.tokens.tolist() for step in flight.steps]
    assert outputs == [[[[1, 1]] * 5], [[[2, 2]] * 5], None]
    assert stat.S_IMODE((tmp_path / "a.npz").stat().st_mode) == 0o600


def test_a_reset_begins_a_new_flight_and_so_does_a_copy_of_the_state(tmp_path):
    each = make_recorder()
    each.dispatch(make_plan(-1))
    each.reset()
    assert each._runner.num_resets == 1 and saved(each, tmp_path / "a.npz").steps == []
    late = each.dispatch(make_plan(-1))
    state = [np.arange(6, dtype=np.int32).reshape(2, 3), np.ones(2, np.float16)]
    each.restart(state)
    late.result()  # of a step that the new flight does not have
    each.dispatch(make_plan(0))
    flight = saved(each, tmp_path / "a.npz")
    assert flight.start == "copy" and len(flight.steps) == 1
    for got, want in zip(flight.state, state, strict=True):
        assert got.dtype == want.dtype and np.array_equal(got, want)


def test_a_full_recorder_forgets_all_and_goes_on_where_no_row_does(tmp_path, monkeypatch):
    """Stale pools change no output, by the laws; so such a plan is a start."""
    monkeypatch.setattr(recorder, "MAX_BYTES", 3 * make_plan(-1).packed.nbytes)
    each = make_recorder()
    for plan in (make_plan(-1), *[make_plan(0)] * 3):
        each.dispatch(plan)
    each.dispatch(make_plan(0, -1))
    with pytest.raises(ValueError, match=r"dropped. Save earlier, or call restart_flight\(\)"):
        each.save(tmp_path / "a.npz")
    each.dispatch(make_plan(-1))
    each.dispatch(make_plan(0))
    flight = saved(each, tmp_path / "a.npz")
    assert flight.start == "idle" and len(flight.steps) == 2


def test_a_failure_leaves_a_file_and_the_error_says_where(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_FILES", 2)
    folder = tmp_path / "state" / "flights"
    for number in range(4):
        monkeypatch.setattr(recorder.time, "strftime", lambda form, n=number: f"flight-{n}.npz")
        each, error = make_recorder(), RuntimeError("the device is gone")
        each.dispatch(make_plan(-1)).result()
        each.save_failure(error, folder)
    (note,) = error.__notes__
    assert f"{folder / 'flight-3.npz'}; `python -m jaxspec replay`" in note
    assert sorted(path.name for path in folder.iterdir()) == ["flight-2.npz", "flight-3.npz"]
    assert read(folder / "flight-3.npz").failure == "RuntimeError: the device is gone"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_flight_that_can_t_be_written_hides_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    error = RuntimeError("the device is gone")
    make_recorder().save_failure(error, tmp_path / "file")
    assert not hasattr(error, "__notes__") and "no flight was written" in caplog.text


def test_ids_that_are_left_out_are_in_no_file_and_no_state_is_copied(tmp_path):
    each = make_recorder(hashed=True)
    values = {"prev_positions": [-1], "num_decode": 1}
    each.dispatch(StepPlan(PROGRAM, pack_plan(PROGRAM, SHAPES, values))).result()
    assert saved(each, tmp_path / "a.npz").hashed
    with pytest.raises(ValueError, match="would show what prompts said"):
        each.restart([])
