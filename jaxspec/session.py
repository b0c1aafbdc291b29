"""Session: samples in, steps that move them on; what every way to call the engine shares."""

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from jaxspec.engine import Engine
from jaxspec.outputs import Sample, TextDelta
from jaxspec.request import Finish, Request

_Result = TypeVar("_Result")


class Session:
    """The samples that run, and the turns in which they move on; any thread may call it.

    One thread at a time has the turn, and a step moves everybody's samples on:

        thread A    add(a)  step: a    wait           step: a, b    a has ended
        thread B    add(b)             step: a, b     wait          step: b   ...

    `add` and `abort` never wait for a turn: they leave a note for the thread that has it, or has it
    next. So a stream may be dropped at any time: the garbage collector may close it within a step.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[Exception], None] | None = None):
        """Run samples on `engine`, which nobody else may step meanwhile.

        `on_failure` hears of an error in a step, before the engine starts afresh.
        """
        self.engine, self.scheduler = engine, engine.scheduler
        self.is_closed = False
        self._on_failure = on_failure
        self._samples: dict[Request, Sample] = {}  # those that the scheduler has
        self._added: deque[tuple[Sample, ...]] = deque()
        self._aborted: deque[tuple[Sample, ...] | str] = deque()  # samples, or a request id
        self._turn, self._next = threading.RLock(), threading.Lock()
        self._holder: int | None = None  # the thread that has the turn
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
        """End every sample with "abort" and collect what is in flight; `add` is refused then."""
        self.in_turn(lambda: self.guarded(self._end_all))

    def check(self, samples: Iterable[Sample]) -> None:
        """Refuse samples that could never run, even alone.

        Raises:
            ValueError: a sample is longer than all pages together.
        """
        self.scheduler.check(sample.request for sample in samples)

    def add(self, samples: Iterable[Sample]) -> None:
        """Let checked samples in with the next step.

        Raises:
            RuntimeError: as in `require_usable`.
        """
        self.require_usable()
        self._added.append(tuple(samples))

    def abort(self, samples: Iterable[Sample] | str) -> None:
        """End those of `samples` that still run, at the latest when the current step is done.

        A text stands for all samples of the request of that id. Once nothing runs, what is in
        flight is collected.
        """
        self._aborted.append(samples if isinstance(samples, str) else tuple(samples))
        self._end_aborted()

    def step(self) -> list[Sample]:
        """Dispatch a step and collect one; the samples that got tokens or their end.

        After an error every sample has ended with "error", and the session starts afresh.
        """
        return self.in_turn(self._step)

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
                left = [sample for sample in left if sample.request in self._samples]
                yield left
        finally:
            self.abort(left)

    def stream(self, sample: Sample) -> Generator[TextDelta, None, None]:
        """Add a sample and yield what it gets, piece by piece, until it has ended.

        Closing it early aborts the sample.
        """
        is_over = False
        try:
            self.add([sample])
            while not is_over:
                delta = self.in_turn(lambda: self._next_delta(sample))
                if delta is not None:
                    is_over = delta.finish_reason is not None
                    yield delta
        finally:
            self.abort([sample])

    def in_turn(self, act: Callable[[], _Result]) -> _Result:
        """What `act` returns, done while no other thread steps.

        Raises:
            RuntimeError: this is a forked child of the session's process.
        """
        check_process(self._process)
        try:
            return self._hold(act)  # pyright: ignore[reportReturnType]
        finally:
            self._end_aborted()

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
            if self._on_failure is not None and isinstance(error, Exception):
                self._on_failure(error)
            self._recover()
            raise
        self._is_whole = True
        return result

    # These run within a turn, except `_end_aborted` and `_hold`.

    def _step(self) -> list[Sample]:
        return self.guarded(self._step_once)

    def _step_once(self) -> list[Sample]:
        self._let_in()
        return [self._read(progress.request) for progress in self.engine.step()]

    def _next_delta(self, sample: Sample) -> TextDelta | None:
        delta = sample.take()  # from a step of another caller
        if delta is None:
            self._step()
            delta = sample.take()
        return delta

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
        return sample

    def _end(self, request: Request) -> None:
        if self._samples.pop(request, None):
            self.scheduler.end(request, Finish.ABORT)

    def _end_all(self) -> None:
        self.is_closed = True
        self._let_in()
        for request in list(self._samples):
            self._end(request)
        self.engine.drain()

    def _end_aborted(self) -> None:
        """End what was aborted; a thread that has the turn does so when that is over.

        Not in a forked child, which drops its copies of what its parent runs.
        """
        while self._aborted and os.getpid() == self._process:
            if not self._hold(lambda: self.guarded(self._end_noted), wait=False):
                return

    def _end_noted(self) -> bool:
        self._let_in()
        while self._aborted:
            note = self._aborted[0]
            if isinstance(note, str):
                note = [sample for sample in self._samples.values() if sample.request_id == note]
            for sample in note:
                self._end(sample.request)
            self._aborted.popleft()
        if not self.scheduler.has_work:
            self.engine.drain()
        return True

    def _recover(self) -> None:
        """Start afresh; every sample ends with "error". It may be run again from any point."""
        self.scheduler.reset(self._samples)
        self.engine.reset()
        self._samples.clear()
        self._is_whole = True

    def _hold(self, act: Callable[[], _Result], *, wait: bool = True) -> _Result | None:
        """Take the turn, act, and give it back; None if it is not free and we do not `wait`.

        A thread that steps in a loop would take a plain lock again before others wake up. So the
        next in line holds `_next`, and a thread that has just had its turn has to wait for that.

        Python hears an interrupt after any call, so also right after the lock was taken. The lock
        knows whether it was, and in a `finally` nothing is heard before the first call is over.
        """
        me = threading.get_ident()
        if self._holder == me:
            # The garbage collector closes a stream or a trace within this thread's own turn.
            return act() if wait else None
        try:
            with self._next if wait else contextlib.nullcontext():
                is_held = self._turn.acquire(wait)
            if not is_held:
                return None
            self._holder = me
            try:
                return act()
            finally:
                self._holder = None
        finally:
            try:  # noqa: SIM105
                self._turn.release()
            except RuntimeError:
                pass  # it was not


def check_process(owner: int) -> None:
    """Refuse to run JAX in a forked child of the process `owner`, where it would hang.

    Raises:
        RuntimeError: this is another process.
    """
    if os.getpid() != owner:
        raise RuntimeError(
            f"An LLM works only in the process that made it, {owner}, and this is {os.getpid()}, "
            "forked from it: threads of JAX do not survive a fork. Make the LLM in the child, "
            "which must be started with multiprocessing's 'spawn'."
        )


@functools.cache
def first_process() -> int:
    """The process in which the first LLM was made, by which JAX has threads."""
    return os.getpid()
