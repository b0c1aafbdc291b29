"""The step loop: plan a step, dispatch it, collect the output of an earlier one."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from jaxspec.plan.block_plan import Copied
from jaxspec.plan.plan import AnyProgram, ForwardPass, StepOutput, StepPlan
from jaxspec.prefix.cache import copy_in, copy_out
from jaxspec.requests.request import AcceptanceCounts, Request
from jaxspec.scheduler.packing import record_logprobs
from jaxspec.scheduler.scheduled_step import Progress, ScheduledStep
from jaxspec.scheduler.scheduler import Scheduler

_SEEN = 1e-4  # seconds; a longer wait for a step means that the host saw its end


class Pending(Protocol):
    """Output of a dispatched plan."""

    def result(self) -> StepOutput: ...

    def done_time(self) -> float | None:
        """Return the `time.perf_counter` of the end on the device; None if it was not watched."""
        ...


class Runner(Protocol):
    """Runs plans on a device."""

    def dispatch(self, plan: StepPlan) -> Pending:
        """Enqueue a plan without waiting."""
        ...

    def reset(self) -> None:
        """Replace the device state by an empty one."""
        ...

    def close(self) -> None:
        """Free the device memory; no plan may be dispatched after this."""
        ...


@dataclasses.dataclass
class EngineMetrics:
    """Numbers of steps and tokens, and the host time of each stage in seconds."""

    num_steps: int = 0  # a dispatch may run several
    num_prompt_tokens: int = 0  # prefilled, again after a preemption
    num_tokens: int = 0  # emitted, including those after a stop string
    num_dropped_drafts: int = 0  # drafts outside the vocabulary, an error of the proposer
    plan_time: float = 0.0
    dispatch_time: float = 0.0
    wait_time: float = 0.0  # waiting for the device
    collect_time: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Times of the stages of a dispatch, in seconds of `time.perf_counter`.

    Between `dispatch_end` and `wait_start` the host plans and dispatches other steps. Of a step in
    halves, `dispatch_end` is that of the first; the host then collects the steps before, computes
    masks and dispatches the second.
    """

    program: AnyProgram
    num_decodes: int  # decode rows in use; the program may have more
    num_prompt_tokens: int  # prefilled tokens; the program may have room for more
    plan_start: float
    dispatch_start: float
    dispatch_end: float
    wait_start: float
    collect_start: float
    collect_end: float
    device_end: float | None  # observed by a thread; None if the runner did not watch


class Engine:
    """Plans the next step on the host while earlier ones run on the device.

        host    plan 0 | plan 1, collect 0 | plan 2, collect 1 | ...
        device         | step 0            | step 1            | ...

    The oldest dispatch is collected once at least `max_in_flight` steps follow it in flight. With 1
    host and device overlap as drawn; 0 collects each step before planning the next (the synchronous
    engine). A dispatch of four steps counts as four, because a new prompt waits for all of them; a
    plan that only copies counts as one. While a request waits for its result, because a grammar
    masks its next token, 1 is the most.

    Masks of the host depend on all earlier tokens. A step with such rows is dispatched in halves:

        host    first half n | collect n - 1, masks of n | second half n, first half n + 1 | ...
        device         | forward pass n                  | rest of n | forward pass n + 1  | ...
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, max_in_flight: int = 2):
        """Create an idle engine.

        Raises:
            ValueError: `max_in_flight` is negative.
        """
        if max_in_flight < 0:
            raise ValueError(
                f"max_in_flight must be at least 0 (0 is the synchronous engine), got "
                f"{max_in_flight}."
            )
        self.scheduler, self.runner, self.max_in_flight = scheduler, runner, max_in_flight
        self.metrics, self.acceptance = EngineMetrics(), AcceptanceCounts()
        self.trace: list[StepTimes] | None = None  # receives the collected steps
        self._in_flight: deque[tuple[ScheduledStep, Pending, tuple[float, float, float]]] = deque()
        self._seen_end: float | None = None  # end of the last collected step, if waited for

    def step(self) -> list[Progress]:
        """Dispatch a step if one can be planned, and collect one if enough are in flight.

        A step in two halves is dispatched whole: all earlier steps are collected between them.

        Returns:
            The progress of the requests of the collected steps.

        Raises:
            RuntimeError: requests wait although nothing is in flight or can be planned.
        """
        progress = list[Progress]()
        started = time.perf_counter()
        step = self.scheduler.schedule()
        planned = time.perf_counter()
        self.metrics.plan_time += planned - started
        if step is not None:
            pending = self.runner.dispatch(step.plan)
            dispatched = time.perf_counter()
            self.metrics.dispatch_time += dispatched - planned
            if isinstance(step.plan.program, ForwardPass):
                step, pending = self._complete(step, progress)
            self._in_flight.append((step, pending, (started, planned, dispatched)))
            self.metrics.num_steps += step.plan.num_steps
        if step is None and not self._in_flight and self.scheduler.has_work:
            raise RuntimeError(
                "A request waits and nothing can run: the scheduler is stuck. This is a bug in "
                "jaxspec."
            )
        if self._in_flight and (step is None or self._num_following() >= self._most_following()):
            progress += self._collect()
        return progress

    def copy_out(self, request: Request) -> Copied:
        """Dispatch a copy of the request's computed prefix to the host, after all planned steps."""
        copied = copy_out(self.scheduler.prefixes, request)
        self._dispatch_copies()
        return copied

    def copy_in(self, request: Request, copied: Copied) -> None:
        """Add a prefix computed by another engine to the cached prefixes of this one."""
        copy_in(self.scheduler.prefixes, request, copied)
        self._dispatch_copies()

    def drain(self) -> list[Progress]:
        """Collect all dispatches in flight. Outputs for finished requests are ignored.

        Returns:
            The progress of the other requests.
        """
        progress = list[Progress]()
        while self._in_flight:
            progress += self._collect()
        return progress

    def reset(self) -> None:
        """Drop all dispatches in flight and empty the device; all requests must have finished."""
        self._in_flight.clear()
        self.runner.reset()

    def close(self) -> None:
        """Drop all dispatches in flight and free the device memory."""
        self._in_flight.clear()
        self.runner.close()
        for observer in self.scheduler.observers:
            observer.close()
        self.scheduler.prefixes.close()

    def stats(self) -> dict[str, Any]:
        """Return the engine's counts, host times in seconds, and rates since its start.

        A round is the verify step of one request. Rates are per second of stepping, the sum of
        `plan_time`, `dispatch_time`, `wait_time` and `collect_time`.
        """
        metrics, num_rounds = self.metrics, self.acceptance.num_drafts
        parts = metrics.plan_time, metrics.dispatch_time, metrics.wait_time, metrics.collect_time
        seconds = sum(parts)
        observed = (observer.stats() for observer in self.scheduler.observers)
        return {
            **vars(metrics),
            "num_rounds": num_rounds,
            "tokens_per_second": metrics.num_tokens / seconds if seconds else 0.0,
            "rounds_per_second": num_rounds / seconds if seconds else 0.0,
            "num_preemptions": self.scheduler.num_preemptions,
            "max_in_flight": self.max_in_flight,
            **{name: value for stats in observed for name, value in stats.items()},
            **self.scheduler.prefixes.stats(),
        }

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def _dispatch_copies(self) -> None:
        """Dispatch the pending copies now instead of with the next plan."""
        if self.scheduler.prefixes.store.copies:
            self.runner.dispatch(self.scheduler.packer.pack_copies(self.scheduler.running))

    def _complete(
        self, step: ScheduledStep, progress: list[Progress]
    ) -> tuple[ScheduledStep, Pending]:
        """Collect all steps in flight, then dispatch the second half of `step`.

        The device runs the first half meanwhile.
        """
        progress += self.drain()
        started = time.perf_counter()
        step = self.scheduler.complete(step)
        planned = time.perf_counter()
        pending = self.runner.dispatch(step.plan)
        self.metrics.plan_time += planned - started
        self.metrics.dispatch_time += time.perf_counter() - planned
        return step, pending

    def _most_following(self) -> int:
        # Beside prompts, a request that waits for its result is in every second step, not in every
        # third.
        awaited = any(request.awaits_result for request in self.scheduler.running)
        return min(1, self.max_in_flight) if awaited else self.max_in_flight

    def _num_following(self) -> int:
        """Return the number of steps in flight after the oldest dispatch."""
        following = itertools.islice(self._in_flight, 1, None)
        return sum(max(1, step.plan.num_steps) for step, *_ in following)

    def _collect(self) -> list[Progress]:
        step, pending, stamps = self._in_flight.popleft()
        started = time.perf_counter()
        output = pending.result()
        waited = time.perf_counter()
        record_logprobs(step, output)
        progress = self.scheduler.collect(step, output)
        self._count(progress)
        self.metrics.num_prompt_tokens += step.num_prompt_tokens
        collected = time.perf_counter()
        self._note_seconds(step, stamps[-1], started, waited)
        self.metrics.wait_time += waited - started
        self.metrics.collect_time += collected - waited
        if self.trace is not None:
            times = (*stamps, started, waited, collected, pending.done_time())
            sizes = (step.plan.program, len(step.decodes), step.num_prompt_tokens)
            self.trace.append(StepTimes(*sizes, *times))
        return progress

    def _count(self, progress: Sequence[Progress]) -> None:
        """Add the step's tokens and drafts to the totals, for all rows at once."""
        given = [each.given for each in progress]
        self.metrics.num_tokens += sum(len(row.tokens) for row in given)
        self.metrics.num_dropped_drafts += sum(row.num_dropped for row in given)
        drafted, accepted = ([row.drafted for row in given], [row.accepted for row in given])
        sums = [list(map(sum, zip(*rows, strict=True))) for rows in (drafted, accepted)]
        self.acceptance.record(*sums)

    def _note_seconds(
        self, step: ScheduledStep, dispatched: float, started: float, ended: float
    ) -> None:
        """Record the step's duration if the host saw its start and its end.

        The host sees the end of a step that it waits for, which is the start of the next one.
        """
        is_seen = ended - started > _SEEN
        if is_seen and self._seen_end is not None:
            seconds = ended - max(self._seen_end, dispatched)
            self.scheduler.step_seconds.note_step(step, seconds)
        self._seen_end = ended if is_seen else None
