"""`Session` runs samples on an engine for the callers of several threads.

`FairLock` decides which thread steps; each step advances the samples of all threads.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from jaxspec.engine.engine import Engine
from jaxspec.engine.gate import Gate, Reason
from jaxspec.plan.block_plan import Copied
from jaxspec.process import check_process
from jaxspec.requests.outputs import Sample, TextDelta, taken
from jaxspec.requests.request import Finish, Request
from jaxspec.scheduler.scheduled_step import Progress

_Result = TypeVar("_Result")


class FairLock:
    """Lock that threads get in turn, and that an interrupt at any time leaves released.

    A thread that steps in a loop would reacquire a plain lock before waiting threads wake up. So
    the next waiting thread holds `_next`, which the looping thread has to acquire first.
    """

    def __init__(self) -> None:
        # Both are reentrant: a signal handler may call while its thread waits for `_next`.
        self._turn, self._next = threading.RLock(), threading.RLock()
        self._holder: int | None = None  # id of the thread that holds the lock

    @property
    def is_mine(self) -> bool:
        return self._holder == threading.get_ident()

    def hold(self, act: Callable[[], _Result]) -> _Result:
        """Return `act()`, called with the lock, which the thread must not hold yet."""
        return self._held(act, wait=True)  # pyright: ignore[reportReturnType]

    def try_hold(self, act: Callable[[], _Result]) -> _Result | None:
        """Return `act()`, called with the lock, or None if any thread holds it.

        The garbage collector may close a stream while the same thread holds the lock.
        """
        return None if self.is_mine else self._held(act, wait=False)

    def _held(self, act: Callable[[], _Result], *, wait: bool) -> _Result | None:
        """Return `act()`, called with the lock; None if it is not free and `wait` is False.

        Python may raise KeyboardInterrupt after any call, even right after the lock was acquired,
        so `release` is always called, and raises if the lock was not acquired. In a `finally` block
        no interrupt is raised before its first call has returned.
        """
        try:
            with self._next if wait else contextlib.nullcontext():
                is_held = self._turn.acquire(wait)
            if not is_held:
                return None
            self._holder = threading.get_ident()
            try:
                return act()
            finally:
                self._holder = None
        finally:
            try:  # noqa: SIM105 (`release` must be the first call, so not `suppress`)
                self._turn.release()
            except RuntimeError:
                pass  # not acquired


class Session:
    """Runs samples on an engine. Thread-safe.

    One thread at a time has the turn to step, and a step advances the samples of all threads:

        thread A    add(a)  step: a    wait           step: a, b    a has finished
        thread B    add(b)             step: a, b     wait          step: b   ...

    `add`, `abort` and `leave_note` never wait for a turn: they leave a note for the thread that has
    it now or next. So a stream may be dropped at any time; the garbage collector may close it
    within a step.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[Exception], None] | None = None):
        """Take over `engine`, which only this session may step.

        `on_failure` and `listener` are called with the error of a step before the engine is reset,
        in the thread that stepped.
        """
        self.engine, self.scheduler = engine, engine.scheduler
        self.is_closed = False
        self._on_failure = on_failure
        self._samples: dict[Request, Sample] = {}  # samples passed to the scheduler
        self._added: deque[tuple[Sample, ...]] = deque()
        self._notes: deque[Callable[[], None]] = deque()  # calls due at the end of the turn
        self._turns, self.gate = FairLock(), Gate()
        self.listener: Callable[[Exception], None] | None = None
        self._is_whole = True  # False during a step and until recovery from a failed one
        self._process = os.getpid()
        self._fault: str | None = None  # why no step may run, although the session is open

    @property
    def has_work(self) -> bool:
        return bool(self._added) or self.engine.has_work

    @property
    def can_step(self) -> bool:
        """True if there is work, and no pause."""
        return self.has_work and (self.gate.is_open or self.is_broken)

    def require_usable(self) -> None:
        """Raise unless the session can serve calls.

        Raises:
            RuntimeError: the session is closed or broken off, or this is a forked child of its
                process.
        """
        self.require_open()
        if self._fault is not None:
            raise RuntimeError(self._fault)

    def require_open(self) -> None:
        """Raise unless the session is open, even if it is broken off.

        Raises:
            RuntimeError: the session is closed, or this is a forked child of its process.
        """
        check_process(self._process)
        if self.is_closed:
            raise RuntimeError("An LLM can't be used once it is closed, and this one is. Make one.")

    def close(self) -> None:
        """Abort all samples and close the engine; later calls of `add` raise."""
        self.in_turn(self._close)

    def check(self, samples: Iterable[Sample]) -> None:
        """Raise if a sample could not run even alone.

        Raises:
            ValueError: a sample may need more pages than there are.
        """
        self.scheduler.check(sample.request for sample in samples)

    def add(self, samples: Iterable[Sample]) -> None:
        """Queue checked samples for the next step, which aborts them while no step may run.

        Raises as `require_open`.
        """
        self.require_open()
        self._added.append(tuple(samples))

    def abort(self, samples: Iterable[Sample] | str) -> None:
        """Abort the unfinished ones of `samples` now or at the end of the current step.

        A str means all current samples of the request with that id. Once no request is left, the
        steps in flight are collected.
        """
        noted = self.of_request(samples) if isinstance(samples, str) else tuple(samples)
        self.leave_note(lambda: self._end_each(noted))

    def leave_note(self, act: Callable[[], None]) -> None:
        """Call `act` within a turn: now, or at the end of the current turn.

        An interrupt may cause a second call.
        """
        self._notes.append(act)
        self._do_notes()

    def settle(self, sample: Sample, num_tokens: int | None = None) -> None:
        """Report that a sample detokenized elsewhere was read to its end.

        `num_tokens` is the output length at which a stop string ends it, even if more tokens were
        generated since.
        """
        self.leave_note(lambda: self._settle(sample.request, num_tokens))

    def step(self) -> list[Sample]:
        """Run one `Engine.step` and return the samples with new tokens or a finish reason.

        While steps are paused it waits a moment. After an exception all samples have finished with
        "error", and the session is reset.
        """
        progressed = self.in_turn(lambda: self.guarded(self._step_once))
        if not progressed:
            self._await_gate()
        return progressed

    def taken(self, samples: Iterable[Sample]) -> list[TextDelta]:
        """Return the next delta of each sample that has one.

        The last delta of a sample with routed experts follows once they are copied, or no step
        remains, so that steps in flight are not awaited.
        """
        return taken(each for each in samples if each.is_copied or not self.can_step)

    def run(self, samples: Sequence[Sample]) -> Generator[Sequence[Sample], None, None]:
        """Add samples and step until all have finished; yield the unfinished ones after each step.

        Closing the generator early aborts them.
        """
        left = samples
        try:
            self.add(samples)
            while left:
                self.step()
                # A sample is removed from the table last: no other thread still adds tokens to it.
                yield (left := [sample for sample in left if sample.request in self._samples])
        finally:
            self._notes.append(lambda: self._end_each(left))  # first; an interrupt may follow
            self._do_notes()

    def stream(self, *samples: Sample) -> Generator[TextDelta, None, None]:
        """Add samples and yield their deltas until all have finished.

        Closing the generator early aborts the unfinished ones.
        """
        for sample in samples:
            sample.request.is_streamed = True
        try:
            self.add(samples)
            while not all(sample.is_taken for sample in samples):
                deltas = self.in_turn(lambda: self._next_deltas(samples))
                if not deltas:
                    self._await_gate()
                yield from deltas
        finally:
            self._notes.append(lambda: self._end_each(samples))
            self._do_notes()

    def withdraw(self, sample: Sample) -> Copied | None:
        """Abort a sample once no step is in flight for it, and return a copy of its prefix.

        Returns None if it has finished before. Raises as `in_turn`.
        """
        return self.in_turn(lambda: self.guarded(lambda: self._withdraw(sample)))

    def bring(self, sample: Sample, copied: Copied, weight_version: str) -> None:
        """Import a prefix computed by another engine, unless weights have another version by now.

        Raises as `add` and `in_turn`.
        """
        self.in_turn(lambda: self._bring(sample.request, copied, weight_version))

    def of_request(self, request_id: str) -> tuple[Sample, ...]:
        """Return the unfinished samples of a request, added ones included."""
        there = [sample for samples in tuple(self._added) for sample in samples]
        there += tuple(self._samples.values())  # a sample may be in both for a moment
        return tuple(dict.fromkeys(each for each in there if each.request_id == request_id))

    def in_turn(self, act: Callable[[], _Result]) -> _Result:
        """Return `act()`, called while no other thread steps.

        Raises:
            RuntimeError: this is a forked child of the session's process, or the thread has the
                turn already, as in a signal handler called within a step.
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

    def _await_gate(self) -> None:
        if not self.is_broken:
            self.gate.wait()

    # Called within a turn

    @property
    def is_broken(self) -> bool:
        """True between `break_off` and `mend`."""
        return self._fault is not None

    def pause(self, *reasons: Reason) -> None:
        """Take no steps while there is one of `reasons`; collect the steps in flight."""
        new: list[Reason] = [each for each in reasons if not self.gate.is_closed_by(each)]
        self.gate.close(*reasons)
        try:
            self.guarded(lambda: self._read_each(self.engine.drain()))
        except BaseException:
            self.gate.open(*new)
            raise

    def break_off(self, fault: str) -> None:
        """Abort all samples and drop all cached prefixes; refuse others until `mend`.

        Args:
            fault: Text of the error of refused calls.
        """
        self._fault = fault
        self.guarded(self.end_all)
        self.guarded(self.scheduler.prefixes.clear)

    def mend(self) -> None:
        """Take samples again."""
        self._fault = None

    def end_all(self) -> int:
        """Abort all samples, and return their number."""
        self._let_in()
        num_samples = len(self._samples)
        self._end_each(None)
        return num_samples

    def report(self, error: Exception) -> None:
        """Report an error outside a step to the `listener`, in any thread."""
        if self.listener is not None:
            self.listener(error)

    def guarded(self, act: Callable[[], _Result]) -> _Result:
        """Return `act()`, and reset the session if it raises. Call it within a turn.

        After an error or an interrupt the device state is undefined, so all samples finish with
        "error". The next call repeats a recovery that was itself interrupted.
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

    # Called within a turn, except `_do_notes`.

    def _after_notes(self, act: Callable[[], _Result]) -> _Result:
        if self._notes:
            self.guarded(self._do_each_note)
        return act()

    def _step_once(self) -> list[Sample]:
        self._let_in()
        if self.is_closed or self.is_broken:
            self._end_each(None)  # samples added meanwhile
            return []
        if not self.gate.is_open:
            return []
        # Progress of several steps, if the last one runs in halves.
        return self._read_each(self.engine.step())

    def _read_each(self, progress: Iterable[Progress]) -> list[Sample]:
        """Read the requests of several steps."""
        return [self._read(request) for request in dict.fromkeys(each.request for each in progress)]

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

    def _bring(self, request: Request, copied: Copied, weight_version: str) -> None:
        self.require_usable()  # another thread may have closed the session
        is_asleep = self.gate.is_closed_by("weights", "kv_cache")
        if weight_version == self.scheduler.weight_version and not is_asleep:
            self.guarded(lambda: self.engine.copy_in(request, copied))

    def _next_deltas(self, samples: Sequence[Sample]) -> list[TextDelta]:
        deltas = self.taken(samples)  # from another caller's step
        if not deltas:
            self.guarded(self._step_once)
            deltas = self.taken(samples)
        return deltas

    def _let_in(self) -> None:
        """Pass added samples to the scheduler, and remove each entry of `_added` afterwards."""
        while self._added:
            samples = [sample for sample in self._added[0] if not sample.request.finish]
            self._samples.update((sample.request, sample) for sample in samples)
            self.scheduler.add(sample.request for sample in samples)
            self._added.popleft()

    def _read(self, request: Request) -> Sample:
        """Detokenize a request's new tokens; a stop string ends the request."""
        sample = self._samples[request]
        num_tokens = sample.read()
        if num_tokens is not None:
            self.scheduler.cut(request, num_tokens)
        if request.finish:
            del self._samples[request]
            if sample.is_settled:
                self.scheduler.settle(request)
        return sample

    def _settle(self, request: Request, num_tokens: int | None) -> None:
        if num_tokens is not None and request.finish not in (Finish.ERROR, Finish.ABORT):
            self._samples.pop(request, None)
            self.scheduler.cut(request, num_tokens)
        self.scheduler.settle(request)

    def _end_each(self, samples: Iterable[Sample] | None) -> None:
        """Abort the unfinished samples of `samples`; None means all."""
        self._let_in()
        for sample in list(self._samples.values()) if samples is None else samples:
            if sample.request in self._samples:
                self.scheduler.end(sample.request, Finish.ABORT)
                del self._samples[sample.request]  # last, since `run` then returns the sample
        if not self.scheduler.has_work:
            self.engine.drain()

    def _close(self) -> None:
        self.is_closed = True
        self.gate.open("pause", "weights", "kv_cache")
        try:
            self.guarded(lambda: self._end_each(None))
        finally:
            self.engine.close()

    def _do_notes(self) -> None:
        """Call the notes, unless another thread has the turn, which calls them at its end.

        A forked child skips this: it only drops its copies of the parent's samples.
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
        """Reset the session; all samples finish with "error". Safe to repeat after an interrupt."""
        self.scheduler.reset(self._samples)
        self.engine.reset()
        self._samples.clear()
        self._is_whole = True
