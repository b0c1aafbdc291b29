"""Diagnostics: what an engine says of itself, its figures, flights, traces, memory and prefixes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.engine import StepTimes
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.metrics import Metric, metrics_of
from jaxspec.pallas import dispatch
from jaxspec.runner.memory import memory_map
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.session import Session


class Diagnostics:
    """Reads an engine that others step; any thread may call.

    Its methods raise a RuntimeError if the session is closed, or in a forked child of its process.
    """

    def __init__(
        self,
        session: Session,
        runner: ModelRunner,
        *,
        flight: FlightRecorder | None,
        method: str | None,
        model_name: str,
    ):
        """Read `session` and `runner`; `flight`: what stands between them, if anything does.

        `method`: who drafts; None: nobody.
        """
        self.session = session  # for those who step it themselves
        self.shapes = runner.shapes  # with the pages that fit
        self._runner, self._flight = runner, flight
        self._method, self.model_name = method, model_name
        self._compile_seconds: dict[str, float] = {}

    def metrics(self) -> dict[str, Any]:
        """Counts, acceptance by method, seconds, speeds, shapes, bytes by pool, what ops run."""
        self.session.require_usable()
        engine = self.session.engine
        return {
            **engine.figures(),
            "acceptance": {self._method: vars(engine.draft_counts).copy()} if self._method else {},
            "shapes": self.shapes.compiled(),
            "compile_seconds": dict(self._compile_seconds),
            "memory_bytes": self._runner.memory(),
            "implementations": dispatch.implementations(),
        }

    def get_metrics(self) -> list[Metric]:
        """The figures that vLLM has too, under its names: counters, gauges and vectors."""
        self.session.require_usable()
        return metrics_of(self.session.engine, self.model_name)

    def save_flight(self, path: str | Path) -> Path:
        """Write the steps since the start to `path`, for `python -m jaxspec replay`.

        Since the last `restart_flight` or failure, if there was one. When a step fails, this
        happens by itself.

        Raises:
            ValueError: the flight recorder is off, or had to drop its steps.
            OSError: the file can't be written.
        """
        self.session.require_usable()
        flight, path = self._require_flight(), Path(path).expanduser()
        self.session.in_turn(lambda: flight.save(path))
        return path

    def restart_flight(self) -> None:
        """Record from here on: copy the device's state to the host and forget the steps before.

        Raises:
            ValueError: the flight recorder is off, or leaves token ids out.
        """
        self.session.in_turn(self._restart_flight_in_turn)

    def _restart_flight_in_turn(self) -> None:
        self.session.require_usable()
        self._require_flight().restart(lambda: self.session.guarded(self._runner.copy_state))

    def _require_flight(self) -> FlightRecorder:
        if self._flight is None:
            raise ValueError(
                "There is no flight to save with flight_recorder='off'. Use 'full' or 'hashed'."
            )
        return self._flight

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix that was kept: prompts are computed anew. True, as vLLM's.

        Requests that run go on, and nothing of them is kept.
        """
        self.session.require_usable()
        prefixes = self.session.scheduler.prefixes
        self.session.in_turn(lambda: self.session.guarded(prefixes.clear))
        return True

    def memory_map(self) -> str:
        """What holds the device's memory, for people: a line each, the biggest first."""
        self.session.require_usable()
        return memory_map(self._runner.memory(), self.shapes)

    @contextlib.contextmanager
    def trace(self) -> Iterator[list[StepTimes]]:
        """`with llm.trace() as steps:` lists when each step was planned, dispatched and run.

        For `jaxspec.plot.timeline`, after the block. Costs a thread that waits for the device.
        """
        self.session.require_usable()
        watching, steps = contextlib.ExitStack(), list[StepTimes]()
        try:
            self.session.in_turn(lambda: self._start_trace(watching, steps))
            yield steps
        finally:
            self.session.leave_note(lambda: self._end_trace(watching, steps))

    def _start_trace(self, watching: contextlib.ExitStack, steps: list[StepTimes]) -> None:
        if self.session.engine.trace is not None:
            raise RuntimeError("An LLM keeps one trace at a time: leave the other `with` first.")
        watching.enter_context(self._runner.watch())
        self.session.engine.trace = steps

    def _end_trace(self, watching: contextlib.ExitStack, steps: list[StepTimes]) -> None:
        if self.session.engine.trace is steps:
            self.session.engine.trace = None
        watching.close()
