"""FlightRecorder: a runner that remembers every plan that passes through it, and what came back."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import StepShapes
from jaxspec.engine import Pending, Runner
from jaxspec.flight import Flight, Start, Step
from jaxspec.flight.file import write
from jaxspec.flight.ids import without_ids
from jaxspec.plan import StepOutput, StepPlan, plan_layout

MAX_BYTES = 2**27  # of plans and outputs in the host's memory: some 10,000 dispatches of 64 rows
MAX_FILES = 8  # that failures leave in a folder; the oldest goes first
_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """Where failures leave their files: the user's state folder, by the XDG specification."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "jaxspec" / "flights"


class FlightRecorder:
    """A `Runner` around another one.

    It remembers from the start, from a saved copy of the state (`restart`), or, once `MAX_BYTES`
    were full, from the next plan that no row of an earlier one goes on in. Remembering a step keeps
    two arrays that exist already; they are packed when a file is written.
    """

    def __init__(self, runner: Runner, shapes: StepShapes, about: dict[str, Any], *, hashed: bool):
        """Record `runner`, whose programs have `shapes`.

        `about`: what a file says of the model and its options (`Flight.about`). `hashed`: token ids
        in files are hashed.
        """
        self._runner, self._shapes, self._about, self._hashed = runner, shapes, about, hashed
        self._begin("empty")

    def dispatch(self, plan: StepPlan) -> Pending:
        """Note `plan`, and enqueue it without waiting."""
        step = self._note(plan)
        pending = self._runner.dispatch(plan)
        return pending if step is None else _Recorded(pending, step, self)

    def reset(self) -> None:
        """Start again from an empty state, and forget what led to the last one."""
        self._runner.reset()
        self._begin("empty")

    def restart(self, state: list[np.ndarray]) -> None:
        """Forget what was recorded: `state` is the newest state of the device, copied.

        Raises:
            ValueError: ids are hashed, while a state holds the keys and values of prompts.
        """
        if self._hashed:
            raise ValueError(
                "A copy of the state would show what prompts said, and flight_recorder='hashed' "
                "keeps that out of files. Use flight_recorder='full', or record from the start."
            )
        self._begin("copy", state)

    def save(self, path: Path, failure: str | None = None) -> None:
        """Write what was recorded to `path`, readable by the user alone.

        Raises:
            ValueError: nothing is recorded at the moment.
            OSError: the file can't be written.
        """
        if self._is_full:
            raise ValueError(
                f"{MAX_BYTES >> 20} MiB of steps came without a moment in which no request ran, so "
                "they were dropped. Save earlier, or call restart_flight() first."
            )
        flight = Flight(
            about=self._about,
            shapes=self._shapes,
            start=self._start,
            steps=list(self._steps),
            state=self._state,
            failure=failure,
        )
        write(path, without_ids(flight) if self._hashed else flight)

    def save_failure(self, error: Exception, folder: Path) -> None:
        """Write what led to `error` into `folder`, and note in the error where; never raises."""
        name = time.strftime(f"flight-%Y%m%d-%H%M%S-{os.getpid()}.npz")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.save(folder / name, failure=f"{type(error).__name__}: {error}"[:2000])
            _drop_oldest(folder)
        except Exception as why:  # the error itself is what the caller must hear of
            _log.warning("no flight was written: %s", why)
            return
        error.add_note(
            f"The steps before it are in {folder / name}; `python -m jaxspec replay` runs them "
            "again."
        )

    def grow(self, num_bytes: int) -> None:
        """Count what is remembered, and drop all of it once it is too much."""
        self._num_bytes += num_bytes
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
            self._is_full = bool((layout.read(plan.packed, "prev_positions") >= 0).any())
            if self._is_full:
                return None
        step = Step(plan.program, plan.packed)
        self._steps.append(step)
        self.grow(plan.packed.nbytes)
        return step


class _Recorded:
    """A step's output on its way, which is noted when it comes."""

    def __init__(self, pending: Pending, step: Step, recorder: FlightRecorder):
        self._pending, self._step, self._recorder = pending, step, recorder

    def result(self) -> StepOutput:
        self._step.output = output = self._pending.result()
        self._recorder.grow(sum(field.nbytes for field in vars(output).values()))
        return output

    def done_time(self) -> float | None:
        return self._pending.done_time()


def _drop_oldest(folder: Path) -> None:
    files = sorted(folder.glob("flight-*.npz"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MAX_FILES]:
        file.unlink(missing_ok=True)
