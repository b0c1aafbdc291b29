"""`Compiler`: compiles an engine's programs, on demand or in a background thread."""

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax.stages

from jaxspec.engine.errors import AsleepError
from jaxspec.plan.plan import AnyProgram, Program
from jaxspec.plan.step_shapes import SchedulerLimits
from jaxspec.requests.sampling_features import LADDER, SamplingFeatures, rung
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.warmup import (
    Notice,
    first_programs,
    label,
    later_programs,
    programs,
    warm_up,
)

_log = logging.getLogger(__name__)
_BATCH = 8  # programs traced concurrently; the interpreter's exit waits for them
_MOST_AT_ONCE = 4  # programs compiled concurrently; XLA uses several cores for each
_EMPTY_RUNS = 3  # a GPU records its command buffers in the second run; the third is timed
_POLL = 0.1  # seconds between looks whether the engine sleeps
_SECONDS_AT_EXIT = 60.0  # longest wait for a compiling program at interpreter exit
Guarded = Callable[[Callable[[], object]], object]


class Compiler:
    """Compiles the programs of a runner, and publishes each one when it is ready.

    With `in_background`, the first request waits for the few programs that can run any request, and
    a thread compiles the others. It runs a new program between two steps, in a separate turn for
    each run, so that a row waits for one empty run at most. Otherwise the programs of a rung of the
    ladder are compiled before its first request.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        *,
        in_turn: Guarded,
        guard: Guarded,
        publish: Callable[[Iterable[AnyProgram]], None],
        on_run: Callable[[Program, float], None],
        notice: Notice,
        in_background: bool,
    ):
        """Start without programs.

        Args:
            runner: Compiles and runs programs.
            limits: Limits of the scheduler, whose plans use the programs.
            in_turn: Calls a function while no step is dispatched; raises AsleepError while the
                engine sleeps.
            guard: Calls a function, and resets the engine if it raises; used within a turn.
            publish: Called within a turn with programs that plans may use from now on.
            on_run: Called within a turn with each program and the seconds of an empty run.
            notice: How to report the compilation of programs that a request waits for.
            in_background: Compile programs in the background.
        """
        self._runner, self._limits = runner, limits
        self._in_turn, self._guard = in_turn, guard
        self._publish, self._on_run = publish, on_run
        self._notice: Notice = notice
        self._in_background = in_background
        self._served: frozenset[SamplingFeatures] = frozenset()  # rungs whose requests can run
        self._background: _Background | None = None
        self._lock = threading.Lock()  # held while the background thread is started or stopped
        self._is_closed = False
        self.seconds: dict[str, float] = {}  # compile times by program label

    def ensure(self, feature_sets: Iterable[SamplingFeatures]) -> None:
        """Compile the programs that requests with these features need, unless compiled.

        Raises:
            AsleepError, RuntimeError: as in `in_turn`.
        """
        rungs = frozenset(map(rung, feature_sets))
        if rungs <= self._served:
            return
        if self._in_background and rungs <= set(LADDER):
            self._in_turn(lambda: self._compile(first_programs(self._runner.shapes, self._limits)))
            self._served |= frozenset(LADDER)
            self._start(rungs)
        else:
            self.complete(rungs)

    def complete(self, feature_sets: Iterable[SamplingFeatures] = LADDER) -> None:
        """Compile all programs of the rungs that these features need, and wait for them.

        Raises:
            RuntimeError: as in `in_turn`.
        """
        self._in_turn(lambda: None)  # raises within a step, where `_stop` would deadlock
        self._stop()
        shapes, rungs = self._runner.shapes, frozenset(map(rung, feature_sets))
        self._in_turn(lambda: self._compile(programs(shapes, self._limits, rungs | self._served)))
        self._served |= rungs
        if self._in_background:
            self._in_turn(lambda: self._compile(first_programs(shapes, self._limits)))
            self._served |= frozenset(LADDER)
            self._start(())

    def close(self) -> None:
        """Stop compiling; a program being compiled is dropped when it is done."""
        self._is_closed = True
        if self._background is not None:
            self._background.stop.set()

    @property
    def is_busy(self) -> bool:
        return self._background is not None and self._background.thread.is_alive()

    def _compile(self, wanted: Sequence[AnyProgram]) -> None:
        self.seconds |= warm_up(
            self._runner,
            wanted,
            notice=self._notice,
            guard=self._guard,
            on_run=self._on_run,
        )
        self._publish(wanted)

    def _start(self, first: Iterable[SamplingFeatures]) -> None:
        with self._lock:
            left = later_programs(self._runner.shapes, first)
            left = [program for program in left if not self._runner.is_warm(program)]
            if left and not self._is_closed and self._background is None:
                self._background = _Background(self._runner, left, self._install)

    def _stop(self) -> None:
        with self._lock:
            if self._background is not None:
                self._background.stop.set()
                self._background.thread.join()
                self._background = None

    def _install(self, program: AnyProgram, compiled: jax.stages.Compiled, seconds: float) -> None:
        """Run a program compiled in the background, and publish it."""
        times = []
        for _ in range(_EMPTY_RUNS):
            run = self._guarded(lambda: times.append(self._runner.run_empty(program, compiled)))
            self._in_turn_awake(run)
        self._in_turn_awake(lambda: self._add(program, compiled, times[-1]))
        self.seconds[label(program)] = seconds

    def _in_turn_awake(self, act: Callable[[], object]) -> None:
        """Call `act` in a turn, once the engine does not sleep."""
        while True:
            try:
                self._in_turn(act)
            except AsleepError:
                time.sleep(_POLL)
                is_stopped = self._background is not None and self._background.stop.is_set()
                if self._is_closed or is_stopped:
                    raise _ClosedError from None
            else:
                return

    def _guarded(self, act: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            if self._is_closed:
                raise _ClosedError
            return self._guard(act)

        return run

    def _add(self, program: AnyProgram, compiled: jax.stages.Compiled, seconds: float) -> None:
        if not self._is_closed:
            self._runner.install(program, compiled)
            if isinstance(program, Program):
                self._on_run(program, seconds)
            self._publish([program])


class _ClosedError(Exception):
    """The engine was closed while a program compiled for it."""


class _Background:
    """Thread that compiles a list of programs until `stop` is set or the interpreter exits."""

    def __init__(
        self,
        runner: ModelRunner,
        left: Sequence[AnyProgram],
        install: Callable[[AnyProgram, jax.stages.Compiled, float], None],
    ):
        self.stop = threading.Event()
        self.thread = threading.Thread(
            target=_compile_all,
            args=(runner, left, install, self.stop),
            name="jaxspec-background",
            daemon=True,
        )
        self.thread.start()


def _compile_all(
    runner: ModelRunner,
    left: Sequence[AnyProgram],
    install: Callable[[AnyProgram, jax.stages.Compiled, float], None],
    stop: threading.Event,
) -> None:
    thread = threading.current_thread()

    def end() -> None:
        # Called at interpreter exit, when a thread inside XLA would crash.
        stop.set()
        thread.join(_SECONDS_AT_EXIT)

    atexit.register(end)
    count = max(1, min(_MOST_AT_ONCE, (os.cpu_count() or 1) // 4))
    pool = ThreadPoolExecutor(count, "jaxspec-compile")
    try:
        for start in range(0, len(left), _BATCH):
            _compile_batch(runner, left[start : start + _BATCH], install, stop, pool, count)
    except (_ClosedError, RuntimeError) as error:  # the engine is closed, or the interpreter exits
        _log.info("nothing more is compiled in the background: %r", error)
    finally:
        pool.shutdown(cancel_futures=True)
        atexit.unregister(end)


def _compile_batch(
    runner: ModelRunner,
    batch: Sequence[AnyProgram],
    install: Callable[[AnyProgram, jax.stages.Compiled, float], None],
    stop: threading.Event,
    pool: ThreadPoolExecutor,
    count: int,
) -> None:
    """Lower programs one after another, and compile `count` of them concurrently."""
    compiling = deque[tuple[AnyProgram, Future[tuple[jax.stages.Compiled, float]]]]()

    def install_oldest() -> None:
        program, future = compiling.popleft()
        try:
            compiled, seconds = future.result()
        except Exception as error:  # its steps run by the programs already compiled
            _log.warning("a program is not compiled (%s): %r", label(program), error)
        else:
            if not stop.is_set():
                install(program, compiled, seconds)

    with contextlib.closing(runner.trace_ahead(batch)) as traced:
        for program in traced:
            if stop.is_set():
                return
            if runner.is_warm(program):
                continue
            started = time.perf_counter()
            lowered = runner.lower(program)
            compiling.append((program, pool.submit(_compiled, lowered, started)))
            while len(compiling) > count or (compiling and compiling[0][1].done()):
                install_oldest()
    while compiling:
        install_oldest()


def _compiled(lowered: jax.stages.Lowered, started: float) -> tuple[jax.stages.Compiled, float]:
    return lowered.compile(), time.perf_counter() - started
