"""`Diagnostics`: metrics, profiles, flights and traces of a loaded engine."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.engine.engine import StepTimes
from jaxspec.engine.metrics import (
    EngineSnapshot,
    Metric,
    kv_cache_usage,
    metrics_of,
    sleep_states,
)
from jaxspec.engine.request_histograms import RequestHistograms
from jaxspec.engine.session import Session
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.pallas import dispatch
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.runner.compiler import Compiler
from jaxspec.runner.memory import memory_map
from jaxspec.runner.model_runner import ModelRunner


class Diagnostics:
    """Metrics and diagnostics of a loaded engine, which sets the attributes.

    Attributes:
        session: The session that runs the samples.
        shapes: Sizes of the engine's programs, including the number of pages.
        model_name: The model as it was given, or the folder name of the embedded model.
    """

    session: Session
    shapes: StepShapes
    model_name: str
    _runner: ModelRunner
    _compiler: Compiler
    _flight: FlightRecorder | None
    _method: str | None  # draft method
    _profiler_folder: str | Path | None
    _histograms: RequestHistograms

    def start_profile(self) -> None:
        """Start a profile of JAX, which `stop_profile` writes to the option `profiler_folder`.

        Raises:
            ValueError: there is no `profiler_folder`, or a profile is running.
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self._profile(lambda folder: jax.profiler.start_trace(folder), "start")

    def stop_profile(self) -> None:
        """End the profile and write it, for TensorBoard or XProf.

        Raises:
            ValueError: there is no `profiler_folder`, or no profile is running.
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self._profile(lambda folder: jax.profiler.stop_trace(), "stop")

    def _profile(self, act: Callable[[Path], object], word: str) -> None:
        self.session.require_usable()
        if self._profiler_folder is None:
            raise ValueError(
                f"{word}_profile needs a folder to write to, and the option profiler_folder is "
                "None. Create the engine with profiler_folder='FOLDER'."
            )
        try:
            act(Path(self._profiler_folder).expanduser())
        except RuntimeError as error:  # JAX has one profile per process
            raise ValueError(
                f"{word}_profile can't {word} a profile of JAX: {error} Call start_profile and "
                "stop_profile in turn."
            ) from error

    @property
    def num_running(self) -> int:
        """Number of samples that have a row."""
        return len(self.session.scheduler.running)

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of pages held by requests, in [0, 1]."""
        return kv_cache_usage(self.session.scheduler)

    def snapshot(self) -> EngineSnapshot:
        """Return all metrics; those by name include `num_running` and `kv_cache_usage`.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        now = {"num_running": self.num_running, "kv_cache_usage": self.kv_cache_usage}
        return EngineSnapshot({**self.metrics(), **now}, self.get_metrics())

    def metrics(self) -> dict[str, Any]:
        """Return the engine's metrics since its start.

        Returns:
            A dict of step, token and preemption counts, host times in seconds, rates per second,
            `acceptance` by draft method, `shapes` of the programs, `compile_seconds` by program,
            `memory_bytes` by pool, `kv_cache` with the dtype of keys and values and whether scales
            divide them, and the `implementations` chosen for each op.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        engine = self.session.engine
        return {
            **engine.stats(),
            "acceptance": {self._method: vars(engine.acceptance).copy()} if self._method else {},
            "shapes": self.shapes.compiled(),
            "compile_seconds": dict(self._compiler.seconds),
            "memory_bytes": self._runner.memory(),
            "kv_cache": self._runner.kv_cache,
            "implementations": dispatch.implementations(),
        }

    def get_metrics(self) -> list[Metric]:
        """Return the metrics shared with vLLM, under vLLM's names.

        Returns:
            Counters, gauges, vectors and histograms, labelled with the model's name.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        name = self.model_name
        is_on_host = self._runner.has_put_away
        sleep = sleep_states(self.session.gate, name, is_on_host=is_on_host)
        return [*metrics_of(self.session.engine, name), *sleep, *self._histograms.metrics(name)]

    def save_flight(self, path: str | Path) -> Path:
        """Write the recorded steps to a file for `python -m jaxspec replay`.

        Steps are recorded from the start, the last failure or the last `restart_flight`. A failed
        step saves its flight automatically.

        Args:
            path: File to write.

        Returns:
            The path, with `~` expanded.

        Raises:
            ValueError: the flight recorder is off, or had to drop its steps.
            OSError: the file can't be written.
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        flight, path = self._require_flight(), Path(path).expanduser()
        self.session.in_turn(lambda: flight.save(path))
        return path

    def restart_flight(self) -> None:
        """Drop the recorded steps and record from a copy of the current device state.

        Raises:
            ValueError: the flight recorder is off or hashes token ids, or the state is too large.
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.in_turn(self._restart_flight_in_turn)

    def _restart_flight_in_turn(self) -> None:
        self.session.require_usable()
        self.session.gate.check_awake()
        self._require_flight().restart(lambda: self.session.guarded(self._runner.copy_state))

    def _require_flight(self) -> FlightRecorder:
        if self._flight is None:
            raise ValueError(
                "There is no flight to save with flight_recorder='off'. Use 'full' or 'hashed'."
            )
        return self._flight

    def memory_map(self) -> str:
        """Return the use of device memory as text, one line per use, the largest first.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        return memory_map(self._runner.memory(), self.shapes)

    @contextlib.contextmanager
    def trace(self) -> Iterator[list[StepTimes]]:
        """Record when each step is planned, dispatched and run.

        Use it as `with llm.trace() as steps:`, and `jaxspec.viz.plot.timeline(steps)` after the
        block. A thread waits for the device meanwhile.

        Yields:
            The list that collected steps are appended to.

        Raises:
            RuntimeError: another trace is active, the engine is closed, or this is a forked child
                of its process.
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
