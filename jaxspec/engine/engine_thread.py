"""`EngineThread`: a thread that steps a session for event loops.

The calls of an `LLM` step their `Session` in the caller's thread. Here a dedicated thread steps it;
tasks of event loops submit requests to that thread and read `AsyncStream`s.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jaxspec.engine.admission import Admission
from jaxspec.engine.errors import DrainingError, EngineDeadError
from jaxspec.engine.sample_stream import Calls, Receiver, SampleStream, TokenDelta
from jaxspec.engine.session import Session
from jaxspec.requests.outputs import Sample

MakeSampleStream = Callable[[Sample], SampleStream]
Settle = Callable[[SampleStream, int | None], None]
_Receiver = TypeVar("_Receiver", bound=Receiver)
_Result = TypeVar("_Result")
Delta = tuple[Receiver, SampleStream, TokenDelta]
_Batch = list[Delta]
_Mail = queue.SimpleQueue[Callable[[], object] | None]
_SECONDS_AT_EXIT = 10.0  # longest wait for the thread at interpreter exit


class EngineThread:
    """Steps a session, and processes the request queue (its mail) before each step.

        tasks            submit    abort                          settle: found a stop string
                            |        |                              |
        engine thread    take mail | step | take mail | step | take mail | ...
                                       |                  |
        event loops                 receive            receive: detokenize

    The thread sleeps while there is neither mail nor work. The deltas of a step are sent to each
    event loop in one call. Mail may be sent from any thread and from finalizers.

    An error in a step ends every stream with `EngineDeadError` and stops the engine for good.
    """

    aborting: float | None = None
    """Seconds in which aborted requests end; None is unlimited."""

    def __init__(self, session: Session, admission: Admission, stream_interval: int = 1):
        """Start the thread, which alone may step `session` from now on.

        `stream_interval` is that of `SampleStream`.
        """
        self._session, self.admission = session, admission
        self._make_sample_stream = functools.partial(
            SampleStream, hand_on=self._hand_on, stream_interval=stream_interval
        )
        self.error: BaseException | None = None  # error of the failed step
        self.ended = concurrent.futures.Future[None]()  # done when the session is closed
        self.ended.set_running_or_notify_cancel()  # makes it impossible to cancel
        self._mail = _Mail()
        # Aborts all requests, closes the session and ends the thread. A partial of the mail queue
        # alone, so that a reference to `stop` does not keep the thread's objects alive.
        self.stop = functools.partial(self._mail.put, None)
        session.listener = functools.partial(_report, self._mail)  # threads that compile may fail
        self._calls = list[concurrent.futures.Future[Any]]()  # those of `call` without a result
        self._calls_error: Callable[[], Exception] | None = None  # makes the error of all others
        # Used by the engine thread only:
        self._live: dict[SampleStream, Receiver] = {}  # samples without a last delta
        self._waiting: dict[Receiver, None] = {}  # requests without a first row
        self._looked_at = (0, 0)  # scheduler counts when `_waiting` was last searched
        self._out: dict[Calls, _Batch] = {}  # deltas of the step
        self._routed = _Batch()  # last deltas of samples, whose routes are being copied
        self._over = list[Receiver]()  # requests that finished in the step
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self.error is None and not self.ended.done()

    @property
    def is_ready(self) -> bool:
        """True if requests are taken."""
        return self.is_running

    def submit(self, make: Callable[[MakeSampleStream, Settle], _Receiver]) -> _Receiver:
        """Queue the checked samples of a prompt.

        Args:
            make: `make(make_sample_stream, settle)` returns the receiver of the request.
                `make_sample_stream(sample)` creates a `SampleStream`. The receiver calls
                `settle(sample_stream, num_tokens)` for each sample with stop strings once it is
                read to its end; `num_tokens` is the output length at which a stop string ends it,
                or None.

        Returns:
            The receiver.

        Raises:
            ServiceError: as in `Admission.admit`.
        """
        receiver = make(self._make_sample_stream, self._note_settled)
        let_in = functools.partial(self._let_in, receiver)
        self.admission.admit(receiver, lambda: self._mail.put(let_in))
        return receiver

    def abort(self, *receivers: Receiver) -> None:
        self._mail.put(functools.partial(self._end, receivers))

    def abort_by_id(self, request_id: str) -> None:
        """Abort all requests with this id submitted so far."""
        self._mail.put(functools.partial(self._end_by_id, request_id))

    def note_ended(self) -> None:
        """Pass on the ends of requests that the session has ended, such as all at an update."""
        self._mail.put(self._end_finished)

    def call(self, act: Callable[[], _Result]) -> concurrent.futures.Future[_Result]:
        """Call `act` in the engine thread between two steps.

        Returns:
            Its result. The future fails with EngineDeadError or DrainingError if the thread has
            failed or ended before.
        """
        future = concurrent.futures.Future[_Result]()
        self._calls.append(future)
        self._mail.put(functools.partial(self._answer, future, act))
        if self._calls_error is not None:
            self._end_calls(self._calls_error)
        return future

    # Called in the engine thread, except `_note_settled`, `_end_calls` and `_at_exit`.

    def _run(self) -> None:
        try:
            while self._take_mail():
                if self._session.can_step:
                    self._session.step()
                if self._session.is_broken:
                    self._end_finished()  # the step has aborted what came meanwhile
                self._note_begun()
                self._send()
        except BaseException as error:
            self._fail(error)
            while self._mail.get() is not None:
                pass  # the engine has failed
        self._close()
        atexit.unregister(self._at_exit)

    def _take_mail(self) -> bool:
        """Process all mail, and wait for mail if there is no work. Return False to stop."""
        is_idle = not (self._session.can_step or self._routed)
        while is_idle or not self._mail.empty():
            act = self._mail.get()
            if act is None:
                return False
            act()
            is_idle = False
        return True

    def _answer(
        self, future: concurrent.futures.Future[_Result], act: Callable[[], _Result]
    ) -> None:
        self._calls.remove(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(act())
        except Exception as error:
            future.set_exception(error)
        self._end_finished()  # requests that the call has aborted

    def _end_calls(self, error: Callable[[], Exception]) -> None:
        self._calls_error = error
        while self._calls:
            with contextlib.suppress(IndexError, concurrent.futures.InvalidStateError):
                self._calls.pop().set_exception(error())

    def _let_in(self, receiver: Receiver) -> None:
        self._live.update(dict.fromkeys(receiver.sample_streams, receiver))
        self._waiting[receiver] = None
        self._looked_at = (-1, 0)
        self._session.add(receiver.sample_streams)

    def _end(self, receivers: Iterable[Receiver]) -> None:
        sample_streams = [
            sample_stream for receiver in receivers for sample_stream in receiver.sample_streams
        ]
        self._session.abort(sample_streams)
        for sample_stream in sample_streams:
            if sample_stream in self._live:
                sample_stream.end()
            elif sample_stream.has_stops:
                self._session.settle(sample_stream)  # its reader will not report the end

    def _end_finished(self) -> None:
        for sample_stream in list(self._live):
            if sample_stream.request.finish:
                sample_stream.end()

    def _end_by_id(self, request_id: str) -> None:
        self._end(
            {receiver for receiver in self._live.values() if receiver.request_id == request_id}
        )

    def _note_settled(self, sample_stream: SampleStream, num_tokens: int | None) -> None:
        self._mail.put(functools.partial(self._settle, sample_stream, num_tokens))

    def _settle(self, sample_stream: SampleStream, num_tokens: int | None) -> None:
        self._session.settle(sample_stream, num_tokens)
        if sample_stream not in self._live:
            return
        if sample_stream.request.returns_routes:  # which its reader waits for
            end = functools.partial(self._end_live, sample_stream)
            self._session.leave_note(lambda: self._mail.put(end))  # after that of the session
        else:
            self._forget(sample_stream)

    def _end_live(self, sample_stream: SampleStream) -> None:
        if sample_stream in self._live:
            sample_stream.end()

    def _hand_on(self, sample_stream: SampleStream, token_delta: TokenDelta) -> None:
        if (receiver := self._live.get(sample_stream)) is not None:
            delta = receiver, sample_stream, token_delta
            if token_delta.routes is None:
                self._queue(delta)
            else:
                self._routed.append(delta)
            if sample_stream.is_over:
                self._forget(sample_stream)

    def _queue(self, delta: Delta) -> None:
        self._out.setdefault(delta[0].loop, []).append(delta)

    def _forget(self, sample_stream: SampleStream) -> None:
        receiver = self._live.pop(sample_stream)
        sample_stream.is_over = True
        if all(each.is_over for each in receiver.sample_streams):
            self._waiting.pop(receiver, None)
            self._over.append(receiver)

    def _queue_routed(self) -> None:
        """Queue the last deltas whose routes are copied: event loops must not wait for a step.

        Without steps in flight all are queued, because their copies end at once.
        """
        deltas, self._routed = self._routed, []
        for delta in deltas:
            routes = delta[2].routes
            if routes is None or routes.is_ready or not self._session.can_step:
                self._queue(delta)
            else:
                self._routed.append(delta)

    def _note_begun(self) -> None:
        """Report the requests that got their first row, if the scheduler's counts changed."""
        scheduler = self._session.scheduler
        counts = len(scheduler.waiting), scheduler.num_preemptions
        if self._waiting and counts != self._looked_at:
            self._looked_at = counts
            for receiver in [receiver for receiver in self._waiting if receiver.has_begun]:
                del self._waiting[receiver]
                self.admission.begun(receiver)
                receiver.begin()

    def _send(self) -> None:
        self._queue_routed()
        batches, self._out = self._out, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(receive_each, batch)
            except RuntimeError:  # the event loop is closed
                self.abort(*{receiver for receiver, *_ in batch})
        over, self._over = self._over, []
        for receiver in over:
            self.admission.over(receiver)

    def _fail(self, error: BaseException) -> None:
        """End every stream with the error, after its pending tokens."""
        self.error = error
        self._end_calls(functools.partial(EngineDeadError, error))
        for sample_stream in self._live:
            sample_stream.release()
        self._drop_routes()
        self._send()
        self._live.clear()
        self._waiting.clear()
        for receiver in self.admission.close(functools.partial(EngineDeadError, error)):
            with contextlib.suppress(RuntimeError):  # the event loop may be closed
                receiver.loop.call_soon_threadsafe(receiver.fail, EngineDeadError(error))
            self.admission.over(receiver)

    def _drop_routes(self) -> None:
        """Let the last deltas be sent without routes, whose copies may have failed or not begun."""
        self._routed = [
            (receiver, sample_stream, token_delta._replace(routes=None))
            for receiver, sample_stream, token_delta in self._routed
        ]

    def _close(self) -> None:
        receivers, failure = self.admission.close(DrainingError), None
        self._end_calls(self._calls_error or DrainingError)
        try:
            self._session.close()
        except BaseException as error:
            failure = error
        self._live.update(
            {
                sample_stream: receiver
                for receiver in receivers
                for sample_stream in receiver.sample_streams
            }
        )
        for sample_stream in list(self._live):
            sample_stream.end()
        if failure is not None:
            self._drop_routes()
        self._send()
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    def _at_exit(self) -> None:
        """Stop before the interpreter exits, since a thread inside JAX would crash then."""
        if os.getpid() == self._process:
            self.stop()
            self._thread.join(_SECONDS_AT_EXIT)


def _report(mail: _Mail, error: Exception) -> None:
    """Make the engine thread raise an error of another thread."""

    def fail() -> None:
        raise error

    mail.put(fail)


def receive_each(batch: Iterable[Delta]) -> None:
    """Let each receiver process its delta, in the thread of its event loop."""
    for receiver, sample_stream, token_delta in batch:
        receiver.receive(sample_stream, token_delta)
