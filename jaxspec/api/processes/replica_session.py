"""ReplicaSession: runs samples on replicas for the callers of several threads."""

import functools
import os
import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Any

from jaxspec.api.processes.replica_group import ReplicaGroup
from jaxspec.engine.async_stream import OutputBuffer
from jaxspec.engine.engine_thread import MakeSampleStream, Settle
from jaxspec.engine.gate import Gate
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.prefix.page_pool import check_fits
from jaxspec.process import check_process
from jaxspec.requests.outputs import Sample, TextDelta
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_params import RequestOutputKind


class Mailbox:
    """Calls for a thread that waits for them, in place of an event loop's."""

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[Callable[[], object]]()
        self.ready: dict[Buffer, None] = {}  # buffers with unread output or an error

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        self._calls.put(functools.partial(callback, *args))

    def wait(self) -> "list[Buffer]":
        """Wait until a buffer has news, make all calls, and return the buffers with news."""
        while not self.ready:
            self._calls.get()()
        while not self._calls.empty():
            self._calls.get()()
        found, self.ready = list(self.ready), {}
        return found


class Buffer(OutputBuffer):
    """Unread deltas of a request whose reader waits at a mailbox."""

    def __init__(
        self,
        mailbox: Mailbox,
        samples: Sequence[Sample],
        make_sample_stream: MakeSampleStream,
        settle: Settle,
    ):
        super().__init__(mailbox, samples, make_sample_stream, settle)
        self.samples, self._mailbox = samples, mailbox

    def _wake(self) -> None:
        self._mailbox.ready[self] = None

    def take_all(self) -> list[TextDelta]:
        return list(iter(self.take, None))

    def end_with_error(self) -> None:
        """End the unfinished samples with "error", which `take` then returns."""
        for sample in self.samples:
            if not sample.request.finish:
                sample.request.finish = Finish.ERROR
                self._due[sample] = None
        self._give_up_routes()
        self.error = None
        self._wake()


class ReplicaSession:
    """Runs samples on replicas, with the calls of `Session` that an `LLM` makes. Thread-safe.

    A call waits for its own requests alone: each has a buffer, and a wake-up reads those with news.
    """

    def __init__(self, group: ReplicaGroup, shapes: StepShapes):
        self._group, self._shapes = group, shapes
        self.gate = Gate()  # replicas are never paused
        self._process = os.getpid()
        self._buffers: dict[Sample, Buffer] = {}  # unfinished samples
        self._added, self._mailbox = set[Buffer](), Mailbox()  # of `add`, which `step` reads
        self._stepping = threading.RLock()

    @property
    def has_work(self) -> bool:
        """True if `step` has not yet returned the end of a sample of `add`."""
        return bool(self._added)

    def require_usable(self) -> None:
        """Raise unless the session can serve calls.

        Raises:
            RuntimeError: the session is closed, or this is a forked child of its process.
            ReplicasDeadError: a replica ended repeatedly.
        """
        check_process(self._process)
        self._group.require_running()

    def close(self) -> None:
        """Abort all samples and end the replicas."""
        check_process(self._process)
        self._group.stop()
        self._group.ended.result()

    def check(self, samples: Iterable[Sample]) -> None:
        """Raise as `Session.check`."""
        for sample in samples:
            check_fits(sample.request.max_len, self._shapes)

    def add(self, samples: Sequence[Sample]) -> None:
        """Queue the checked samples of one prompt, which `step` reads."""
        self.require_usable()
        if not samples[0].request.is_streamed:
            _make_whole(samples)
        self._added.add(self._submit(self._mailbox, samples))

    def abort(self, samples: Iterable[Sample] | str) -> None:
        """Abort unfinished samples; a str means those of the request with that id."""
        if isinstance(samples, str):
            self._group.abort_by_id(samples)
        else:
            found = (self._buffers.get(sample) for sample in samples)
            self._group.abort(*{buffer for buffer in found if buffer is not None})

    def step(self) -> list[tuple[Buffer, list[TextDelta]]]:
        """Wait for news of the samples of `add`, and return it by prompt.

        Raises:
            ServiceError: a replica ended; its samples end with "error" in later calls.
            BaseException: an interrupt, after which all samples do.
        """
        with self._stepping:
            if not self._added:
                return []
            try:
                buffers = self._mailbox.wait()
            except BaseException:  # an interrupt, which may have lost a delta
                for buffer in self._added:
                    self._group.abort(buffer)
                    buffer.end_with_error()
                raise
            failed = next((buffer for buffer in buffers if buffer.error is not None), None)
            if failed is not None:
                self._mailbox.ready.update(dict.fromkeys(buffers))  # for the next call
                error = failed.error
                self._group.abort(failed)  # its replica may be fine
                failed.end_with_error()
                assert error is not None
                raise error
            return [(buffer, self._read(buffer)) for buffer in buffers]

    def run(self, samples: Sequence[Sample]) -> Generator[Collection[Sample], None, None]:
        """Run samples and yield the unfinished ones whenever some have finished.

        Closing the generator early aborts them.
        """
        self.require_usable()
        mailbox, buffers, left = Mailbox(), set[Buffer](), dict.fromkeys(samples)
        _make_whole(samples)
        try:
            for prompt in _by_prompt(samples):
                buffers.add(self._submit(mailbox, prompt))
            while left:
                for buffer in mailbox.wait():
                    if buffer.error is not None:
                        raise buffer.error
                    for delta in self._read(buffer):
                        if delta.finish_reason is not None:
                            del left[buffer.samples[delta.index]]
                    if buffer.has_ended:
                        buffers.discard(buffer)
                yield left
        finally:
            self._drop(buffers)

    def stream(self, *samples: Sample) -> Generator[TextDelta, None, None]:
        """Run the samples of one prompt and yield their deltas.

        Closing the generator early aborts them.
        """
        self.require_usable()
        mailbox, buffers = Mailbox(), set[Buffer]()
        try:
            buffer = self._submit(mailbox, samples)
            buffers.add(buffer)
            while not buffer.has_ended:
                mailbox.wait()
                yield from self._read(buffer)
                if buffer.error is not None:
                    raise buffer.error
        finally:
            self._drop(buffers)

    def _submit(self, mailbox: Mailbox, samples: Sequence[Sample]) -> Buffer:
        buffer = self._group.submit(functools.partial(Buffer, mailbox, samples))
        self._buffers.update(dict.fromkeys(samples, buffer))
        return buffer

    def _read(self, buffer: Buffer) -> list[TextDelta]:
        """Return the unread deltas, and forget the samples after their last ones."""
        deltas = buffer.take_all()
        if buffer.has_ended:
            self._forget(buffer)
        return deltas

    def _drop(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            if not buffer.has_ended:
                self._group.abort(buffer)
            self._forget(buffer)

    def _forget(self, buffer: Buffer) -> None:
        self._added.discard(buffer)
        for sample in buffer.samples:
            self._buffers.pop(sample, None)


def _by_prompt(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    firsts = [place for place, sample in enumerate(samples) if sample.index == 0]
    for first, end in zip(firsts, [*firsts[1:], len(samples)], strict=True):
        yield samples[first:end]


def _make_whole(samples: Iterable[Sample]) -> None:
    """Let each sample have one delta, at its end: no caller reads it earlier."""
    for request in (sample.request for sample in samples):
        if request.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            request.params = request.params.clone()
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
