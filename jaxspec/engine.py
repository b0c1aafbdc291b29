"""The loop that keeps the device busy: plan a step, dispatch it, collect an earlier one."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from jaxspec.piece_plan import Copied
from jaxspec.plan import Program, StepOutput, StepPlan
from jaxspec.request import DraftCounts, Request
from jaxspec.scheduler.logprobs import record_logprobs
from jaxspec.scheduler.prefix_copies import copy_in, copy_out
from jaxspec.scheduler.scheduled_step import Progress, ScheduledStep
from jaxspec.scheduler.scheduler import Scheduler

_SEEN = 1e-4  # seconds: who waits so long for a step sees its end


class Pending(Protocol):
    """A step's output on its way."""

    def result(self) -> StepOutput:
        """Wait for it."""
        ...

    def done_time(self) -> float | None:
        """When the device was done (`time.perf_counter`), if the runner watches."""
        ...


class Runner(Protocol):
    """Where plans go."""

    def dispatch(self, plan: StepPlan) -> Pending:
        """Enqueue a plan without waiting."""
        ...

    def reset(self) -> None:
        """Start again from an empty state, whatever became of the last one."""
        ...

    def close(self) -> None:
        """Give the device's memory back; nothing is dispatched any more."""
        ...


@dataclasses.dataclass
class EngineMetrics:
    """Steps dispatched, tokens that came of them, and where the host's time went (seconds)."""

    num_steps: int = 0  # a dispatch may make several
    num_tokens: int = 0  # given to requests, also those that a stop string then cut away
    num_dropped_drafts: int = 0  # verified, but no ids of the vocabulary: a proposer's mistake
    plan_time: float = 0.0
    dispatch_time: float = 0.0
    wait_time: float = 0.0  # for the device
    collect_time: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """When a dispatch was planned, sent, run and collected: seconds of `time.perf_counter`.

    Each stage begins where the one before it ends, but the host waits for one only when it
    collects it, and in between plans and dispatches others.
    """

    program: Program
    num_decodes: int  # rows that decode, of as many as the program has room for
    num_prompt_tokens: int  # that are read, of as many as the program has room for
    plan_start: float
    dispatch_start: float
    dispatch_end: float
    wait_start: float
    collect_start: float
    collect_end: float
    device_end: float | None  # as a thread saw it; None: the runner did not watch


class Engine:
    """Plans the next step on the host while earlier ones still run on the device.

        host    plan 0 | plan 1, collect 0 | plan 2, collect 1 | ...
        device         | step 0            | step 1            | ...

    The oldest dispatch is collected once at least `max_in_flight` steps are behind it: 1 overlaps
    as drawn, 0 collects each before planning the next, which is the synchronous engine. A dispatch
    of four steps counts as four, for a new prompt waits for all of them; one that copies as one.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, max_in_flight: int = 2):
        """Join a scheduler and a runner.

        Raises:
            ValueError: `max_in_flight` is negative.
        """
        if max_in_flight < 0:
            raise ValueError(
                f"max_in_flight must be at least 0 (0 is the synchronous engine), got "
                f"{max_in_flight}."
            )
        self.scheduler, self.runner, self.max_in_flight = scheduler, runner, max_in_flight
        self.metrics, self.draft_counts = EngineMetrics(), DraftCounts()
        self.trace: list[StepTimes] | None = None  # if a list, collected steps are noted there
        self._in_flight: deque[tuple[ScheduledStep, Pending, tuple[float, float, float]]] = deque()
        self._seen_end: float | None = None  # of the last step collected, if the host waited for it

    def step(self) -> list[Progress]:
        """Dispatch a step if one can be planned, and collect one if enough are in flight."""
        started = time.perf_counter()
        step = self.scheduler.schedule()
        planned = time.perf_counter()
        self.metrics.plan_time += planned - started
        if step is not None:
            pending = self.runner.dispatch(step.plan)
            dispatched = time.perf_counter()
            self._in_flight.append((step, pending, (started, planned, dispatched)))
            self.metrics.num_steps += step.plan.program.num_steps
            self.metrics.dispatch_time += dispatched - planned
        if step is None and not self._in_flight and self.scheduler.has_work:
            raise RuntimeError(
                "A request waits and nothing can run: the scheduler is stuck. This is a bug in "
                "jaxspec."
            )
        if self._in_flight and (step is None or self._num_behind() >= self.max_in_flight):
            return self._collect()
        return []

    def copy_out(self, request: Request) -> Copied:
        """Copy what the device has of a request's text to the host, behind all that is planned."""
        copied = copy_out(self.scheduler.prefixes, request)
        self._dispatch_copies()
        return copied

    def copy_in(self, request: Request, copied: Copied) -> None:
        """Keep what another engine computed of a request's text, as if it were computed here."""
        copy_in(self.scheduler.prefixes, request, copied)
        self._dispatch_copies()

    def drain(self) -> None:
        """Collect all that is in flight; what it says of ended requests is ignored."""
        while self._in_flight:
            self._collect()

    def reset(self) -> None:
        """Drop what is in flight and empty the device; every request must have ended."""
        self._in_flight.clear()
        self.runner.reset()

    def close(self) -> None:
        """Drop what is in flight and give the device's memory back."""
        self._in_flight.clear()
        self.runner.close()
        self.scheduler.drafter.close()
        self.scheduler.prefixes.close()

    def figures(self) -> dict[str, Any]:
        """Counts and seconds of the engine's life, and what came in a second.

        A round is one verify of one request. A second is one in which the engine was stepped:
        `plan_time`, `dispatch_time`, `wait_time` and `collect_time` together.
        """
        metrics, num_rounds = self.metrics, self.draft_counts.num_drafts
        parts = metrics.plan_time, metrics.dispatch_time, metrics.wait_time, metrics.collect_time
        seconds = sum(parts)
        return {
            **vars(metrics),
            "num_rounds": num_rounds,
            "tokens_per_second": metrics.num_tokens / seconds if seconds else 0.0,
            "rounds_per_second": num_rounds / seconds if seconds else 0.0,
            "num_preemptions": self.scheduler.num_preemptions,
            "max_in_flight": self.max_in_flight,
            **self.scheduler.drafter.figures(),
            **self.scheduler.prefixes.figures(),
        }

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step uncollected."""
        return self.scheduler.has_work or bool(self._in_flight)

    def _dispatch_copies(self) -> None:
        """Have those made now that the next plan would begin with."""
        if self.scheduler.prefixes.store.copies:
            self.runner.dispatch(self.scheduler.plans.only_copies(self.scheduler.running))

    def _num_behind(self) -> int:
        """Steps in flight behind the oldest dispatch; one that only copies counts as one."""
        behind = itertools.islice(self._in_flight, 1, None)
        return sum(max(1, step.plan.program.num_steps) for step, *_ in behind)

    def _collect(self) -> list[Progress]:
        step, pending, launch = self._in_flight.popleft()
        started = time.perf_counter()
        output = pending.result()
        waited = time.perf_counter()
        record_logprobs(step, output)
        progress = self.scheduler.collect(step, output)
        self._count(progress)
        collected = time.perf_counter()
        self._note_seconds(step, launch[-1], started, waited)
        self.metrics.wait_time += waited - started
        self.metrics.collect_time += collected - waited
        if self.trace is not None:
            times = (*launch, started, waited, collected, pending.done_time())
            sizes = (step.plan.program, len(step.decodes), step.num_prompt_tokens)
            self.trace.append(StepTimes(*sizes, *times))
        return progress

    def _count(self, progress: Sequence[Progress]) -> None:
        """Add what requests got to the counts of the engine's life, for all rows at once."""
        given = [each.given for each in progress]
        self.metrics.num_tokens += sum(len(row.tokens) for row in given)
        self.metrics.num_dropped_drafts += sum(row.num_dropped for row in given)
        drafted, accepted = ([row.drafted for row in given], [row.accepted for row in given])
        sums = [list(map(sum, zip(*rows, strict=True))) for rows in (drafted, accepted)]
        self.draft_counts.record(*sums)

    def _note_seconds(
        self, step: ScheduledStep, dispatched: float, started: float, ended: float
    ) -> None:
        """Tell the scheduler what a step took, if the host saw both its beginning and its end.

        It sees the end of a step that it waits for, which is where the next one begins.
        """
        is_seen = ended - started > _SEEN
        if is_seen and self._seen_end is not None:
            seconds = ended - max(self._seen_end, dispatched)
            self.scheduler.step_seconds.note_step(step, seconds)
        self._seen_end = ended if is_seen else None
