"""Session: samples in, steps that move them on; what every way to call the engine shares."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from jaxspec.engine import Engine
from jaxspec.outputs import Sample, TextDelta, taken
from jaxspec.piece_plan import Copied
from jaxspec.process import check_process
from jaxspec.request import Finish, Request
from jaxspec.turns import Turns

_Result = TypeVar("_Result")


class Session:
    """The samples that run, and the turns in which they move on; any thread may call it.

    One thread at a time has the turn, and a step moves everybody's samples on:

        thread A    add(a)  step: a    wait           step: a, b    a has ended
        thread B    add(b)             step: a, b     wait          step: b   ...

    `add`, `abort` and `leave_note` never wait for a turn: they leave a note for the thread that has
    it, or has it next. So a stream may be dropped at any time: the garbage collector may close it
    within a step.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[Exception], None] | None = None):
        """Run samples on `engine`, which nobody else may step meanwhile.

        `on_failure` hears of an error in a step, before the engine starts afresh, and so does
        `listener`, whichever thread the step was in.
        """
        self.engine, self.scheduler = engine, engine.scheduler
        self.is_closed = False
        self._on_failure = on_failure
        self._samples: dict[Request, Sample] = {}  # those that the scheduler has
        self._added: deque[tuple[Sample, ...]] = deque()
        self._notes: deque[Callable[[], None]] = deque()  # what to do when a turn ends
        self._turns = Turns()
        self.listener: Callable[[Exception], None] | None = None
        self._is_whole = True  # False: a step began and did not end well
        self._process = os.getpid()

    @property
    def has_work(self) -> bool:
        """Whether a sample is unfinished or a step uncollected."""
        return bool(self._added) or self.engine.has_work

    def require_usable(self) -> None:
        """Refuse a call that could not be served.

        Raises:
            RuntimeError: the session is closed, or this is a forked child of its process.
        """
        check_process(self._process)
        if self.is_closed:
            raise RuntimeError("An LLM can't be used once it is closed, and this one is. Make one.")

    def close(self) -> None:
        """End every sample, and give back what the engine holds; `add` is refused then."""
        self.in_turn(self._close)

    def check(self, samples: Iterable[Sample]) -> None:
        """Refuse samples that could never run, even alone.

        Raises:
            ValueError: a sample is longer than all pages together.
        """
        self.scheduler.check(sample.request for sample in samples)

    def add(self, samples: Iterable[Sample]) -> None:
        """Let checked samples in with the next step. Raises as `require_usable`."""
        self.require_usable()
        self._added.append(tuple(samples))

    def abort(self, samples: Iterable[Sample] | str) -> None:
        """End those of `samples` that still run, at the latest when the current step is done.

        A text stands for all samples that are there now of the request of that id. Once nothing
        runs, what is in flight is collected.
        """
        noted = self.of_request(samples) if isinstance(samples, str) else tuple(samples)
        self.leave_note(lambda: self._end_each(noted))

    def leave_note(self, act: Callable[[], None]) -> None:
        """Have `act` done within a turn: at once, or when the turn that is on ends.

        It may be done twice, should an interrupt come.
        """
        self._notes.append(act)
        self._do_notes()

    def settle(self, sample: Sample, num_tokens: int | None = None) -> None:
        """Say that a sample whose text is made elsewhere was read to its end.

        With `num_tokens` that is where a stop string ends it, and it may have run past it.
        """
        self.leave_note(lambda: self._settle(sample.request, num_tokens))

    def step(self) -> list[Sample]:
        """Dispatch a step and collect one; the samples that got tokens or their end.

        After an error every sample has ended with "error", and the session starts afresh.
        """
        return self.in_turn(lambda: self.guarded(self._step_once))

    def run(self, samples: Sequence[Sample]) -> Generator[Sequence[Sample], None, None]:
        """Add samples and step until all have ended; yields after each step those that have not.

        Closing it early aborts them.
        """
        left = samples
        try:
            self.add(samples)
            while left:
                self.step()
                # One that has left the table is whole: no other thread's step still adds to it.
                yield (left := [sample for sample in left if sample.request in self._samples])
        finally:
            self._notes.append(lambda: self._end_each(left))  # first, for an interrupt may follow
            self._do_notes()

    def stream(self, *samples: Sample) -> Generator[TextDelta, None, None]:
        """Add samples and yield what they get, piece by piece, until all have ended.

        Closing it early aborts those that run.
        """
        for sample in samples:
            sample.request.is_streamed = True
        try:
            self.add(samples)
            while not all(sample.is_taken for sample in samples):
                yield from self.in_turn(lambda: self._next_deltas(samples))
        finally:
            self._notes.append(lambda: self._end_each(samples))
            self._do_notes()

    def withdraw(self, sample: Sample) -> Copied | None:
        """End a sample with "abort" once nothing is in flight for it; its tokens' copies.

        None: it ended before. Raises as `in_turn`.
        """
        return self.in_turn(lambda: self.guarded(lambda: self._withdraw(sample)))

    def bring(self, sample: Sample, copied: Copied) -> None:
        """Keep what another engine computed of a sample's tokens. Raises as `add` and `in_turn`."""
        self.in_turn(lambda: self._bring(sample.request, copied))

    def of_request(self, request_id: str) -> tuple[Sample, ...]:
        """The samples of a request that are there, in any thread, those just added included."""
        there = [sample for samples in tuple(self._added) for sample in samples]
        there += tuple(self._samples.values())  # one that is being let in may be in both
        return tuple(dict.fromkeys(each for each in there if each.request_id == request_id))

    def in_turn(self, act: Callable[[], _Result]) -> _Result:
        """What `act` returns, done while no other thread steps.

        Raises:
            RuntimeError: this is a forked child of the session's process, or the thread has the
                turn already, as where a signal's handler calls within a step.
        """
        check_process(self._process)
        if self._turns.is_mine:
            raise RuntimeError(
                "An LLM can't be called from within its own step, as by a signal's handler or a "
                "finalizer. Set a flag there, and call when the step is over."
            )
        try:
            return self._turns.hold(lambda: self._after_notes(act))
        finally:
            self._do_notes()

    def guarded(self, act: Callable[[], _Result]) -> _Result:
        """What `act` returns; within a turn. After an error or an interrupt the session is new.

        Nobody knows then what the device holds, so every sample ends with "error". A recovery that
        was itself cut short is made up for by the next call.
        """
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        try:
            result = act()
        except BaseException as error:
            try:
                for hear in (self.listener, self._on_failure):
                    if hear is not None and isinstance(error, Exception):
                        hear(error)
            finally:
                self._recover()
            raise
        self._is_whole = True
        return result

    # These run within a turn, except `_do_notes`.

    def _after_notes(self, act: Callable[[], _Result]) -> _Result:
        if self._notes:
            self.guarded(self._do_each_note)
        return act()

    def _step_once(self) -> list[Sample]:
        self._let_in()
        if self.is_closed:
            self._end_each(None)  # added while it was closed
            return []
        return [self._read(progress.request) for progress in self.engine.step()]

    def _withdraw(self, sample: Sample) -> Copied | None:
        self._let_in()
        request = sample.request
        if request in self.scheduler.running:
            self.scheduler.preempt(request)
        while request.in_flight and not request.finish:
            self._step_once()
        is_there = request in self._samples and not (request.finish and not request.is_prefill_only)
        copied = self.engine.copy_out(request) if is_there else None
        self._end_each([sample])
        return copied

    def _bring(self, request: Request, copied: Copied) -> None:
        self.require_usable()  # another thread may have closed it
        self.guarded(lambda: self.engine.copy_in(request, copied))

    def _next_deltas(self, samples: Sequence[Sample]) -> list[TextDelta]:
        deltas = taken(samples)  # from a step of another caller
        if not deltas:
            self.guarded(self._step_once)
            deltas = taken(samples)
        return deltas

    def _let_in(self) -> None:
        """Hand what was added to the scheduler; a note goes when that is done."""
        while self._added:
            samples = [sample for sample in self._added[0] if not sample.request.finish]
            self._samples.update((sample.request, sample) for sample in samples)
            self.scheduler.add(sample.request for sample in samples)
            self._added.popleft()

    def _read(self, request: Request) -> Sample:
        """Turn a request's new tokens into text; a stop string in it ends the request."""
        sample = self._samples[request]
        num_tokens = sample.read()
        if num_tokens is not None:
            self.scheduler.cut(request, num_tokens)
        if request.finish:
            del self._samples[request]
            if sample.is_settled:
                self.scheduler.drafter.settle(request)
        return sample

    def _settle(self, request: Request, num_tokens: int | None) -> None:
        if num_tokens is not None and request.finish not in (Finish.ERROR, Finish.ABORT):
            self._samples.pop(request, None)
            self.scheduler.cut(request, num_tokens)
        self.scheduler.drafter.settle(request)

    def _end_each(self, samples: Iterable[Sample] | None) -> None:
        """End those that still run; None stands for all."""
        self._let_in()
        for sample in list(self._samples.values()) if samples is None else samples:
            if sample.request in self._samples:
                self.scheduler.end(sample.request, Finish.ABORT)
                del self._samples[sample.request]  # last: `run` takes what is not there for whole
        if not self.scheduler.has_work:
            self.engine.drain()

    def _close(self) -> None:
        self.is_closed = True
        try:
            self.guarded(lambda: self._end_each(None))
        finally:
            self.engine.close()

    def _do_notes(self) -> None:
        """Do what was noted; a thread that has the turn does so when that is over.

        Not in a forked child, which drops its copies of what its parent runs.
        """
        while self._notes and os.getpid() == self._process:
            if not self._turns.try_hold(lambda: self.guarded(self._do_each_note)):
                return

    def _do_each_note(self) -> bool:
        while self._notes:
            self._notes[0]()
            self._notes.popleft()
        return True

    def _recover(self) -> None:
        """Start afresh; every sample ends with "error". It may be run again from any point."""
        self.scheduler.reset(self._samples)
        self.engine.reset()
        self._samples.clear()
        self._is_whole = True
