"""Session: samples in, steps that move them on; what every way to call the engine shares."""

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence

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

    def __init__(self, engine: Engine):
        """Run samples on `engine`, which nobody else may step meanwhile."""
        self.engine, self.scheduler = engine, engine.scheduler
        self._samples: dict[Request, Sample] = {}  # those that the scheduler has
        self._added: deque[tuple[Sample, ...]] = deque()
        self._aborted: deque[tuple[Sample, ...]] = deque()
        self._turn, self._next = threading.Lock(), threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether a sample is unfinished or a step uncollected."""
        return bool(self._added) or self.engine.has_work

    def check(self, samples: Iterable[Sample]) -> None:
        """Refuse samples that could never run, even alone.

        Raises:
            ValueError: a sample is longer than all pages together.
        """
        self.scheduler.check(sample.request for sample in samples)

    def add(self, samples: Iterable[Sample]) -> None:
        """Let checked samples in with the next step."""
        self._added.append(tuple(samples))

    def abort(self, samples: Iterable[Sample]) -> None:
        """End those of `samples` that still run, at the latest when the current step is done.

        Once nothing runs, what is in flight is collected.
        """
        self._aborted.append(tuple(samples))
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

        A thread that steps in a loop would take a plain lock again before others wake up. So the
        next in line holds `_next`, and a thread that has just had its turn has to wait for that.
        """
        with self._next:
            self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()
            self._end_aborted()

    # These run within a turn, except `_end_aborted`, which takes one if it is free.

    def _step(self) -> list[Sample]:
        self._let_in()
        with self._or_fail():
            return [self._read(progress.request) for progress in self.engine.step()]

    def _let_in(self) -> None:
        while self._added:
            samples = self._added.popleft()
            self._samples.update((sample.request, sample) for sample in samples)
            self.scheduler.add(sample.request for sample in samples)

    def _read(self, request: Request) -> Sample:
        """Turn a request's new tokens into text; a stop string in it ends the request."""
        sample = self._samples[request]
        num_tokens = sample.read()
        if num_tokens is not None:
            self.scheduler.cut(request, num_tokens)
        if request.finish:
            del self._samples[request]
        return sample

    def _end_aborted(self) -> None:
        """End what was aborted; a thread that has the turn does so when that is over."""
        while self._aborted and self._turn.acquire(blocking=False):
            try:
                self._let_in()
                while self._aborted:  # another thread may have ended them since
                    for sample in self._aborted.popleft():
                        if self._samples.pop(sample.request, None):
                            self.scheduler.end(sample.request, Finish.ABORT)
                if not self.scheduler.has_work:
                    with self._or_fail():
                        self.engine.drain()
            finally:
                self._turn.release()

    @contextlib.contextmanager
    def _or_fail(self) -> Iterator[None]:
        """After an error or an interrupt inside, nobody knows what the device holds: start afresh.

        Every sample ends with "error".
        """
        try:
            yield
        except BaseException:
            for request in self._samples:
                self.scheduler.end(request, Finish.ERROR)
            self._samples.clear()
            self.engine.reset()
            raise
