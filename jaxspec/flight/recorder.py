"""Flight recorder: a runner that stores all plans dispatched through it, and their outputs."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.engine.engine import Pending, Runner
from jaxspec.files import state_folder
from jaxspec.flight import Flight, Start, Step, file
from jaxspec.flight.blocks import without_ids
from jaxspec.layout import PackedLayout
from jaxspec.plan.plan import StepOutput, StepPlan, output_layout, plan_layout
from jaxspec.plan.step_shapes import StepShapes

MAX_BYTES = 2**27  # limit for plans and outputs: some 26,000 dispatches of 64 rows
MAX_FILES = 8  # limit for files of failures in a folder; the oldest are deleted
_OVERHEAD = 200  # bytes of a Python array object and its list entry
_OF_FAILURES = re.compile(r"flight-\d{8}-\d{6}-\d{9}\.npz")
_log = logging.getLogger(__name__)


class FlightRecorder:
    """Wrapper of a `Runner` that records its steps.

    It stores the steps since the start, or since the last copy of the state (`restart`). If they
    exceed `MAX_BYTES`, all are dropped, and recording resumes at a plan without rows of earlier
    plans.
    """

    def __init__(self, runner: Runner, shapes: StepShapes, about: dict[str, Any], *, hashed: bool):
        """Record `runner`, whose programs have `shapes`.

        `about` describes the model and its options (`Flight.about`). If `hashed`, token ids in
        files are hashed.
        """
        self._runner, self._shapes, self._about, self._hashed = runner, shapes, about, hashed
        self._begin("empty")

    def dispatch(self, plan: StepPlan) -> Pending:
        step = self._note(plan)
        pending = self._runner.dispatch(plan)
        if step is None:
            return pending
        return _Recorded(pending, step, self, output_layout(self._shapes.num_drafts))

    def reset(self) -> None:
        self._runner.reset()
        self._begin("empty")

    def close(self) -> None:
        self._begin("empty")
        self._runner.close()

    def restart(self, copy_state: Callable[[], list[np.ndarray]]) -> None:
        """Drop the recorded steps, and begin with the device's state, as returned by `copy_state`.

        Raises:
            ValueError: ids are hashed, while a state holds the keys and values of prompts; or the
                state is too large for a file.
        """
        if self._hashed:
            raise ValueError(
                "A copy of the state would show what prompts said, and flight_recorder='hashed' "
                "keeps that out of files. Use flight_recorder='full', or record from the start."
            )
        state = copy_state()
        if (size := sum(leaf.nbytes for leaf in state)) > file.MAX_BYTES:
            raise ValueError(
                f"A copy of the state must have at most {file.MAX_BYTES:,} bytes, and this one has "
                f"{size:,}. Record from the start, or with fewer pages."
            )
        self._begin("copy", state)

    def renew_weights(self, version: str) -> None:
        """Drop the recorded steps; begin at a plan without rows of earlier plans."""
        self._about = {**self._about, "weight_version": version}
        self._begin("idle")
        self._is_full = True

    def save(self, path: Path, failure: str | None = None) -> None:
        """Write the recorded steps to `path`, readable by the user alone.

        Raises:
            ValueError: no steps are recorded at the moment.
            OSError: the file can't be written.
        """
        if self._is_full:
            raise ValueError(
                f"Since {MAX_BYTES >> 20} MiB of steps, or since other weights, no moment came in "
                "which no request ran, so the steps were dropped. Save earlier, or call "
                "restart_flight() first."
            )
        flight = Flight(
            about=self._about,
            shapes=self._shapes,
            start=self._start,
            steps=list(self._steps),
            state=self._state,
            failure=failure,
        )
        file.write(path, without_ids(flight) if self._hashed else flight)

    def save_failure(self, error: Exception, folder: str | Path | None) -> None:
        """Write the steps before `error` to a file, and add its path to the error; never raises.

        `folder` is that of the file; None means the user's state folder.
        """
        try:
            place = Path(folder).expanduser() if folder else state_folder() / "flights"
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = place / time.strftime(f"flight-%Y%m%d-%H%M%S-{time.time_ns() % 10**9:09d}.npz")
            self.save(path, failure=f"{type(error).__name__}: {error}"[:2000])
        except Exception as why:  # the caller must get the error itself
            _log.warning("no flight was written: %s", why)
            return
        error.add_note(
            f"The steps before it are in {path}; `python -m jaxspec replay` runs them again."
        )
        _drop_oldest(place)

    def remember(self, array: np.ndarray) -> None:
        """Count the bytes of a stored array, and drop all steps if there are too many."""
        self._num_bytes += array.nbytes + _OVERHEAD
        if self._num_bytes > MAX_BYTES:
            self._begin("idle")
            self._is_full = True

    def _begin(self, start: Start, state: list[np.ndarray] | None = None) -> None:
        self._start: Start = start
        self._state = state
        self._steps: list[Step] = []
        self._num_bytes, self._is_full = 0, False

    def _note(self, plan: StepPlan) -> Step | None:
        if self._is_full:
            layout = plan_layout(plan.program, self._shapes)
            if "prev_positions" not in layout.fields:  # the plan has no rows
                return None
            self._is_full = bool((layout.read(plan.packed, "prev_positions") >= 0).any())
            if self._is_full:
                return None
        steps = [Step(each.program, each.packed) for each in (*plan.before, plan)]
        self._steps += steps
        for step in steps:
            self.remember(step.packed)
        return steps[-1]


class _Recorded:
    """Pending output of a step, which is recorded when it is complete."""

    def __init__(
        self, pending: Pending, step: Step, recorder: FlightRecorder, layout: PackedLayout
    ):
        self._pending, self._step, self._recorder = pending, step, recorder
        self._layout = layout

    def result(self) -> StepOutput:
        output = self._pending.result()
        # A copy: the fields are views of memory of the device's runtime.
        fields = [self._layout.bits(name, getattr(output, name)) for name in self._layout.fields]
        self._step.output = np.concatenate(fields, axis=-1)
        self._recorder.remember(self._step.output)
        return output

    def done_time(self) -> float | None:
        return self._pending.done_time()


def _drop_oldest(folder: Path) -> None:
    """Delete all but the newest files of failures; their names sort by time."""
    with contextlib.suppress(OSError):  # another process may do the same
        names = sorted(name for name in os.listdir(folder) if _OF_FAILURES.fullmatch(name))
        for name in names[:-MAX_FILES]:
            (folder / name).unlink(missing_ok=True)
