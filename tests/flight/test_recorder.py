"""What a recorder keeps of the steps that pass through it, and what it writes when one fails."""

import stat
import tracemalloc

import numpy as np
import pytest
from fake_device import make_buckets

from jaxspec.flight import recorder
from jaxspec.flight.file import read
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.plan.plan import Program, StepOutput, StepPlan, output_layout, pack_plan
from jaxspec.plan.row import row_layout
from jaxspec.requests.sampling_features import GREEDY

SHAPES = make_buckets(num_drafts=1)
PROGRAM = Program(5, 0, GREEDY, 1, 1)
ABOUT = {
    "options": {"model": None},
    "vocab_size": 50,
    "checkpoint": "0",
    "device": "cpu",
    "versions": {"jax": "1.2"},
}


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

    def close(self):
        self.is_closed = True


class FakePending:
    def __init__(self, number):
        self.number = number

    def result(self):
        counts = np.zeros((1, 5), np.int32)
        tokens = np.full((1, 5, 2), self.number, np.int32)
        return StepOutput(tokens, *[counts] * 4, tokens[:, :, 1:])

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
    first, second, third = (step.output for step in flight.steps)
    assert third is None
    for number, packed in ((1, first), (2, second)):
        output = StepOutput.unpack(packed, output_layout(1))
        assert output.tokens.tolist() == [[[number, number]] * 5]
        assert output.num_accepted.tolist() == [[0] * 5]
    assert stat.S_IMODE((tmp_path / "a.npz").stat().st_mode) == 0o600


def test_a_reset_begins_a_new_flight_and_so_does_a_copy_of_the_state(tmp_path):
    each = make_recorder()
    each.dispatch(make_plan(-1))
    each.reset()
    assert each._runner.num_resets == 1 and saved(each, tmp_path / "a.npz").steps == []
    late = each.dispatch(make_plan(-1))
    rows = np.zeros((SHAPES.max_num_seqs, row_layout(1).size), np.int32)
    tables = np.zeros((SHAPES.num_slots, SHAPES.pages_per_seq), np.int32)
    state = [rows, tables, np.ones(2, np.float16)]
    each.restart(lambda: state)
    late.result()  # of a step that the new flight does not have
    each.dispatch(make_plan(0))
    flight = saved(each, tmp_path / "a.npz")
    assert flight.start == "copy" and len(flight.steps) == 1
    for got, want in zip(flight.state, state, strict=True):
        assert got.dtype == want.dtype and np.array_equal(got, want)


def test_a_full_recorder_forgets_all_and_goes_on_where_no_row_does(tmp_path, monkeypatch):
    """Stale pools change no output, by the laws; so such a plan is a start."""
    monkeypatch.setattr(recorder, "MAX_BYTES", 3 * (make_plan(-1).packed.nbytes + 200))
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
    folder.mkdir(parents=True, mode=0o700)
    (folder / "flight-mine.npz").write_text("a file that the user keeps there")
    errors = [RuntimeError(f"the device is gone {number}") for number in range(4)]
    for error in errors:
        each = make_recorder()
        each.dispatch(make_plan(-1)).result()
        each.save_failure(error, folder)
    kept = sorted(path for path in folder.iterdir() if path.name != "flight-mine.npz")
    assert len(kept) == 2 and (folder / "flight-mine.npz").exists()
    for path, error in zip(kept, errors[-2:], strict=True):
        (note,) = error.__notes__
        assert f"{path}; `python -m jaxspec replay`" in note
        assert read(path).failure == f"RuntimeError: {error}"


def test_the_user_s_state_folder_takes_it_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    each = make_recorder()
    each.dispatch(make_plan(-1))
    each.save_failure(RuntimeError("the device is gone"), None)
    (path,) = (tmp_path / "jaxspec" / "flights").iterdir()
    assert read(path).failure and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_account_without_a_home_starts_and_keeps_no_file(monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    error = RuntimeError("the device is gone")
    make_recorder().save_failure(error, None)
    assert not hasattr(error, "__notes__") and "no absolute path" in caplog.text


def test_what_is_counted_is_what_the_host_s_memory_holds():
    """A step with one row: its two arrays, and what Python takes for them."""
    each, plan = make_recorder(), make_plan(0)
    for _ in range(50):  # whatever is made once
        each.dispatch(plan).result()
    tracemalloc.start()
    try:
        counted = each._num_bytes
        for _ in range(500):
            each.dispatch(StepPlan(plan.program, plan.packed.copy())).result()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 * held < each._num_bytes - counted < 1.5 * held


def test_a_closed_recorder_holds_nothing(tmp_path):
    each = make_recorder()
    each.dispatch(make_plan(-1))
    each.restart(lambda: [np.ones(10**6)])
    each.close()
    assert each._runner.is_closed and each._state is None and not each._steps


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
        each.restart(lambda: pytest.fail("the state was copied"))
