"""Session: samples in, steps that move them on; what every way to call the engine shares."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from jaxspec.engine import Engine
from jaxspec.outputs import Sample, TextDelta
from jaxspec.request import Finish, Request


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
        check_process(self._process)
        with self.turn():
            self.is_closed = True
            with self.guard():
                self._let_in()
                for request in list(self._samples):
                    self._end(request)
                self.engine.drain()

    def check(self, samples: Iterable[Sample]) -> None:
        """Refuse samples that could never run, even alone.

        Raises:
            ValueError: a sample is longer than max_model_len, or than all pages together.
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
        with self.turn():
            return self._step()

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
                with self.turn():
                    delta = sample.take()  # from a step of another caller
                    if delta is None:
                        self._step()
                        delta = sample.take()
                if delta is not None:
                    is_over = delta.finish_reason is not None
                    yield delta
        finally:
            self.abort([sample])

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Only the thread inside may step; the others wait, and each gets its turn.

        Raises:
            RuntimeError: this is a forked child of the session's process.
        """
        check_process(self._process)
        if self._holder == threading.get_ident():
            yield  # a generator that the garbage collector closes within this thread's turn
            return
        try:
            with self._taken(blocking=True):
                yield
        finally:
            self._end_aborted()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within a turn: after an error or an interrupt inside, the session starts afresh.

        Nobody knows then what the device holds, so every sample ends with "error". A recovery that
        was itself cut short is made up for by the next guard.
        """
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        try:
            yield
        except BaseException as error:
            if self._on_failure is not None and isinstance(error, Exception):
                self._on_failure(error)
            self._recover()
            raise
        self._is_whole = True

    # These run within a turn, except `_end_aborted`, which takes one if it is free.

    def _step(self) -> list[Sample]:
        with self.guard():
            self._let_in()
            return [self._read(progress.request) for progress in self.engine.step()]

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

    def _end_aborted(self) -> None:
        """End what was aborted; a thread that has the turn does so when that is over.

        Not in a forked child, which drops its copies of what its parent runs.
        """
        while self._aborted and self._holder != threading.get_ident():
            if os.getpid() != self._process:
                return
            with self._taken(blocking=False) as is_taken:
                if not is_taken:
                    return
                with self.guard():
                    self._let_in()
                    self._abort_noted()
                    if not self.scheduler.has_work:
                        self.engine.drain()

    def _abort_noted(self) -> None:
        while self._aborted:
            note = self._aborted[0]
            if isinstance(note, str):
                note = [sample for sample in self._samples.values() if sample.request_id == note]
            for sample in note:
                self._end(sample.request)
            self._aborted.popleft()

    def _recover(self) -> None:
        """Start afresh; every sample ends with "error". It may be run again from any point."""
        self.scheduler.reset(self._samples)
        self.engine.reset()
        self._samples.clear()
        self._is_whole = True

    @contextlib.contextmanager
    def _taken(self, *, blocking: bool) -> Iterator[bool]:
        """Take the turn and give it back; whether it could be had at once, if not `blocking`.

        A thread that steps in a loop would take a plain lock again before others wake up. So the
        next in line holds `_next`, and a thread that has just had its turn has to wait for that.
        """
        me = threading.get_ident()
        try:
            with self._next if blocking else contextlib.nullcontext():
                is_taken = self._turn.acquire(blocking)
            if is_taken:
                self._holder = me
            yield is_taken
        finally:
            # Python hears an interrupt after a call. So none comes before this one; and whether the
            # lock was taken when one came above is known to the lock alone.
            if self._holder == me:
                self._holder = None
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
