"""EngineThread: the thread that steps a session for tasks of event loops."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxspec.admission import Admission
from jaxspec.arrivals import Arrival, Receiver, Tap
from jaxspec.async_errors import DrainingError, EngineDeadError
from jaxspec.outputs import Sample
from jaxspec.session import Session

MakeTap = Callable[[Sample], Tap]
Settle = Callable[[Tap, int | None], None]
_Receiver = TypeVar("_Receiver", bound=Receiver)
_Batch = list[tuple[Receiver, Tap, Arrival]]
_Mail = queue.SimpleQueue[Callable[[], object] | None]
_SECONDS_AT_EXIT = 10.0  # that the end of Python waits for a step


class EngineThread:
    """Steps a session, and takes its mail before each step; it sleeps while there is neither.

        tasks              submit    abort                            settle: a stop string ends it
                              |        |                                |
        engine's thread    take mail | step | take mail | step | take mail | ...
                                         |                  |
        event loops                   receive            receive: text of tokens

    What a step brought goes to each event loop in one call. The mailbox may be written to from
    anywhere, also from within the garbage collector.

    An error in a step ends every stream with `EngineDeadError`. Nothing is stepped any more then.
    """

    def __init__(self, session: Session, admission: Admission, stream_interval: int = 1):
        """Start; nobody else may step `session`. `stream_interval`: as in `Tap`."""
        self._session, self.admission = session, admission
        self._make_tap = functools.partial(
            Tap, hand_on=self._hand_on, stream_interval=stream_interval
        )
        self.error: BaseException | None = None  # what a step failed with
        self.ended = concurrent.futures.Future[None]()  # done when the session is closed
        self.ended.set_running_or_notify_cancel()  # so nobody cancels it
        self._mail = _Mail()
        # End what runs with "abort", close the session, and end the thread. It refers to the
        # mailbox only, so keeping it keeps nothing else alive.
        self.stop = functools.partial(self._mail.put, None)
        session.listener = functools.partial(_report, self._mail)  # other threads compile, trace
        # These are the thread's own.
        self._live: dict[Tap, Receiver] = {}  # samples whose end was not handed on
        self._waiting: dict[Receiver, None] = {}  # requests that had no row yet
        self._looked_at = (0, 0)  # what the scheduler said when these were looked through
        self._out: dict[asyncio.AbstractEventLoop, _Batch] = {}  # what the step brought
        self._over = list[Receiver]()  # requests that have ended in it
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it serves requests."""
        return self.error is None and not self.ended.done()

    def submit(self, make: Callable[[MakeTap, Settle], _Receiver]) -> _Receiver:
        """Queue checked samples of one prompt, for the receiver that `make` makes of them.

        `make(make_tap, settle)` gets what makes the tap of a sample, and what is to be told of each
        sample with stop strings that was read to its end, and where a stop string ends it.

        Raises:
            ServiceError: as in `Admission.admit`.
        """
        receiver = make(self._make_tap, self._note_settled)
        let_in = functools.partial(self._let_in, receiver)
        self.admission.admit(receiver, lambda: self._mail.put(let_in))
        return receiver

    def abort(self, *receivers: Receiver) -> None:
        """End requests, unless they have ended."""
        self._mail.put(functools.partial(self._end, receivers))

    def abort_by_id(self, request_id: str) -> None:
        """End all requests of this id that were submitted before."""
        self._mail.put(functools.partial(self._end_by_id, request_id))

    # The thread's own.

    def _run(self) -> None:
        try:
            while self._take_mail():
                if self._session.has_work:
                    self._session.step()
                self._note_begun()
                self._send()
        except BaseException as error:
            self._fail(error)
            while self._mail.get() is not None:
                pass  # it comes too late
        self._close()
        atexit.unregister(self._at_exit)

    def _take_mail(self) -> bool:
        """Do all that was asked for, and wait for that if nothing runs; False: stop."""
        is_idle = not self._session.has_work
        while is_idle or not self._mail.empty():
            act = self._mail.get()
            if act is None:
                return False
            act()
            is_idle = False
        return True

    def _let_in(self, receiver: Receiver) -> None:
        self._live.update(dict.fromkeys(receiver.taps, receiver))
        self._waiting[receiver] = None
        self._looked_at = (-1, 0)
        self._session.add(receiver.taps)

    def _end(self, receivers: Iterable[Receiver]) -> None:
        taps = [tap for receiver in receivers for tap in receiver.taps]
        self._session.abort(taps)
        for tap in taps:
            if tap in self._live:
                tap.end()
            elif tap.has_stops:
                self._session.settle(tap)  # nobody reads it to its end

    def _end_by_id(self, request_id: str) -> None:
        self._end(
            {receiver for receiver in self._live.values() if receiver.request_id == request_id}
        )

    def _note_settled(self, tap: Tap, num_tokens: int | None) -> None:
        self._mail.put(functools.partial(self._settle, tap, num_tokens))

    def _settle(self, tap: Tap, num_tokens: int | None) -> None:
        self._session.settle(tap, num_tokens)
        if tap in self._live:
            self._forget(tap)

    def _hand_on(self, tap: Tap, arrival: Arrival) -> None:
        if (receiver := self._live.get(tap)) is not None:
            self._out.setdefault(receiver.loop, []).append((receiver, tap, arrival))
            if tap.is_over:
                self._forget(tap)

    def _forget(self, tap: Tap) -> None:
        receiver = self._live.pop(tap)
        tap.is_over = True
        if all(each.is_over for each in receiver.taps):
            self._waiting.pop(receiver, None)
            self._over.append(receiver)

    def _note_begun(self) -> None:
        """Tell which requests have a row now; they are looked through if one may have got it."""
        scheduler = self._session.scheduler
        counts = len(scheduler.waiting), scheduler.num_preemptions
        if self._waiting and counts != self._looked_at:
            self._looked_at = counts
            for receiver in [receiver for receiver in self._waiting if receiver.has_begun]:
                del self._waiting[receiver]
                self.admission.begun(receiver)

    def _send(self) -> None:
        batches, self._out = self._out, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_receive, batch)
            except RuntimeError:  # the loop is closed: nobody reads any more
                self.abort(*{receiver for receiver, *_ in batch})
        over, self._over = self._over, []
        for receiver in over:
            self.admission.over(receiver)

    def _fail(self, error: BaseException) -> None:
        """Every stream gets what came before, and then the error."""
        self.error = error
        for tap in self._live:
            tap.release()
        self._send()
        self._live.clear()
        self._waiting.clear()
        for receiver in self.admission.close(functools.partial(EngineDeadError, error)):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                receiver.loop.call_soon_threadsafe(receiver.fail, EngineDeadError(error))
            self.admission.over(receiver)

    def _close(self) -> None:
        receivers, failure = self.admission.close(DrainingError), None
        try:
            self._session.close()
        except BaseException as error:
            failure = error
        self._live.update({tap: receiver for receiver in receivers for tap in receiver.taps})
        for tap in list(self._live):
            tap.end()
        self._send()
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    def _at_exit(self) -> None:
        """Python ends: a thread that is within JAX then would crash."""
        if os.getpid() == self._process:
            self.stop()
            self._thread.join(_SECONDS_AT_EXIT)


def _report(mail: _Mail, error: Exception) -> None:
    """Have the engine's thread raise what failed in any thread."""

    def fail() -> None:
        raise error

    mail.put(fail)


def _receive(batch: _Batch) -> None:
    """In the thread of their event loop."""
    for receiver, tap, arrival in batch:
        receiver.receive(tap, arrival)
