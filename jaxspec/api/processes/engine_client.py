"""EngineClient: the requests that this process has sent to an engine in another process."""

import functools
import itertools
from collections.abc import Callable, Sequence

from jaxspec.api.processes.channel import Channel
from jaxspec.engine.engine_thread import Delta, MakeSampleStream, Settle
from jaxspec.engine.sample_stream import Receiver, SampleStream, TokenDelta
from jaxspec.requests.outputs import Sample


class Submission:
    """A request for another process: its receiver, and its samples that have not ended there.

    Attributes:
        receiver: Consumer of its deltas in this process.
        running: Indices of the samples without a last delta.
        unsettled: Indices of the samples with stop strings whose reader has not reported the end.
        is_accepted: True once the other process has queued it, so that it can be aborted there.
        is_aborted: True once it is to end early.
    """

    def __init__(
        self,
        make: Callable[[MakeSampleStream, Settle], Receiver],
        settle: Callable[["Submission", SampleStream, int | None], None],
    ):
        """Create the receiver by `make`, as in `EngineThread.submit`."""
        self.number = -1  # set by `EngineClient.new_number`; identifies it in both processes
        self.receiver = make(_sample_stream_of, functools.partial(settle, self))
        sample_streams = self.receiver.sample_streams
        self.running = {each.index for each in sample_streams}
        self.unsettled = {each.index for each in sample_streams if each.has_stops}
        self.is_accepted = self.is_aborted = False

    def end(self) -> None:
        """Let it be over in this process, before the other one says so."""
        self.is_aborted = True
        self.running.clear()
        self.unsettled.clear()

    @property
    def is_over(self) -> bool:
        """True if no message about it will follow."""
        return not self.running and (self.is_aborted or not self.unsettled)


def _sample_stream_of(sample: Sample) -> SampleStream:
    """Return a stream that passes nothing on: the other process has the one that is read."""
    return SampleStream(sample, lambda sample_stream, token_delta: None)


class EngineClient:
    """Sends requests to the engine at the other end of a channel, and receives their deltas.

    Used in the event loop of the channel, which the caller runs.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        receive: Callable[[Sequence[Delta]], None],
        failed: Callable[[Submission, Exception], None],
        begun: Callable[[Submission], None] = lambda submission: None,
        over: Callable[[Submission], None] = lambda submission: None,
    ):
        """Handle the engine's messages.

        Args:
            channel: The channel.
            receive: Called with the deltas of one message.
            failed: Called with the error that ended a request, which is forgotten.
            begun: Called when a request has its first row.
            over: Called when a request is forgotten because all its samples have ended.
        """
        self.submissions = dict[int, Submission]()  # sent, not over
        self._channel, self._receive, self._on_failed = channel, receive, failed
        self._on_begun, self._on_over = begun, over
        self._numbers = itertools.count()
        own = {"deltas": self._deltas, "failed": self._failed}
        channel.handlers = {**channel.handlers, **own}

    def new_number(self) -> int:
        return next(self._numbers)

    async def take_over(self, number: int, submission: Submission) -> None:
        """Send a request and wait until the engine has queued it.

        Raises:
            ConnectionError: the other process is gone.
            Exception: the engine refuses the request, which is forgotten.
        """
        submission.number = number
        self.submissions[number] = submission
        requests = [each.request for each in submission.receiver.sample_streams]
        for request in requests:
            request.tokens = []  # send the prompt once, as `request.prompt`
        try:
            await self._channel.call("take_over", number, requests)
        except BaseException:
            self.submissions.pop(number, None)
            self._channel.notify("abort", number)
            raise
        submission.is_accepted = True
        if submission.is_aborted:
            self._channel.notify("abort", number)

    def settle(self, submission: Submission, sample_stream: SampleStream, end: int | None) -> None:
        """Report that a sample with stop strings was read to its end; see `EngineThread.submit`."""
        self._channel.notify("settle", submission.number, sample_stream.index, end)
        submission.unsettled.discard(sample_stream.index)
        if not sample_stream.request.returns_routes:  # else a delta with them will follow
            submission.running.discard(sample_stream.index)
        self._end_if_over(submission)

    def abort(self, submission: Submission) -> None:
        """End a request early; its samples end with "abort"."""
        if submission.is_aborted or submission.number not in self.submissions:
            return
        submission.is_aborted = True
        if submission.is_accepted:
            self._channel.notify("abort", submission.number)
        self._end_if_over(submission)

    def forget_all(self) -> list[Submission]:
        """Return the unfinished requests, of which nothing more is received."""
        submissions, self.submissions = self.submissions, {}
        return list(submissions.values())

    def _deltas(self, token_deltas: list[tuple[int, int, TokenDelta]], begun: list[int]) -> None:
        for number in begun:
            if (submission := self.submissions.get(number)) is not None:
                submission.receiver.sample_streams[0].request.generation = 1
                self._on_begun(submission)
        deltas, touched = list[Delta](), dict[Submission, None]()
        for number, index, token_delta in token_deltas:
            if (submission := self.submissions.get(number)) is not None:
                receiver = submission.receiver
                deltas.append((receiver, receiver.sample_streams[index], token_delta))
                if token_delta.finish:
                    submission.running.discard(index)
                touched[submission] = None
        self._receive(deltas)
        for submission in touched:
            self._end_if_over(submission)

    def _end_if_over(self, submission: Submission) -> None:
        if submission.is_over and self.submissions.pop(submission.number, None) is not None:
            if not submission.is_aborted:
                self._channel.notify("release", submission.number)
            self._on_over(submission)

    def _failed(self, number: int, error: Exception) -> None:
        if (submission := self.submissions.pop(number, None)) is not None:
            self._on_failed(submission, error)
