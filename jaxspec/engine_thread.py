"""EngineThread: the thread that steps a session for tasks of event loops."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

from jaxspec.admission import Admission
from jaxspec.arrivals import Arrival, Tap
from jaxspec.async_errors import DrainingError, EngineDeadError
from jaxspec.async_stream import Inbox
from jaxspec.outputs import Sample
from jaxspec.session import Session

_Batch = list[tuple[Inbox, Tap, Arrival]]
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
        self._stream_interval = stream_interval
        self.error: BaseException | None = None  # what a step failed with
        self.ended = concurrent.futures.Future[None]()  # done when the session is closed
        self.ended.set_running_or_notify_cancel()  # so nobody cancels it
        self._mail = _Mail()
        # End what runs with "abort", close the session, and end the thread. It refers to the
        # mailbox only, so keeping it keeps nothing else alive.
        self.stop = functools.partial(self._mail.put, None)
        session.listener = functools.partial(_report, self._mail)  # other threads compile, trace
        # These are the thread's own.
        self._live: dict[Tap, Inbox] = {}  # samples whose end was not handed on
        self._waiting: dict[Inbox, None] = {}  # requests that had no row yet
        self._looked_at = (0, 0)  # what the scheduler said when these were looked through
        self._out: dict[asyncio.AbstractEventLoop, _Batch] = {}  # what the step brought
        self._over = list[Inbox]()  # requests that have ended in it
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it serves requests."""
        return self.error is None and not self.ended.done()

    def submit(self, loop: asyncio.AbstractEventLoop, samples: Sequence[Sample]) -> Inbox:
        """Queue checked samples of one prompt, for a task of `loop`.

        Raises:
            ServiceError: as in `Admission.admit`.
        """
        calls = self._hand_on, self._note_settled
        inbox = Inbox(loop, samples, *calls, self._stream_interval)
        let_in = functools.partial(self._let_in, inbox)
        self.admission.admit(inbox, lambda: self._mail.put(let_in))
        return inbox

    def abort(self, *inboxes: Inbox) -> None:
        """End requests, unless they have ended."""
        self._mail.put(functools.partial(self._end, inboxes))

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

    def _let_in(self, inbox: Inbox) -> None:
        self._live.update(dict.fromkeys(inbox.taps, inbox))
        self._waiting[inbox] = None
        self._looked_at = (-1, 0)
        self._session.add(inbox.taps)

    def _end(self, inboxes: Iterable[Inbox]) -> None:
        taps = [tap for inbox in inboxes for tap in inbox.taps]
        self._session.abort(taps)
        for tap in taps:
            if tap in self._live:
                tap.end()
            elif tap.has_stops:
                self._session.settle(tap)  # nobody reads it to its end

    def _end_by_id(self, request_id: str) -> None:
        self._end({inbox for inbox in self._live.values() if inbox.request_id == request_id})

    def _note_settled(self, tap: Tap, num_tokens: int | None) -> None:
        self._mail.put(functools.partial(self._settle, tap, num_tokens))

    def _settle(self, tap: Tap, num_tokens: int | None) -> None:
        self._session.settle(tap, num_tokens)
        if tap in self._live:
            self._forget(tap)

    def _hand_on(self, tap: Tap, arrival: Arrival) -> None:
        if (inbox := self._live.get(tap)) is not None:
            self._out.setdefault(inbox.loop, []).append((inbox, tap, arrival))
            if tap.is_over:
                self._forget(tap)

    def _forget(self, tap: Tap) -> None:
        inbox = self._live.pop(tap)
        tap.is_over = True
        if all(each.is_over for each in inbox.taps):
            self._waiting.pop(inbox, None)
            self._over.append(inbox)

    def _note_begun(self) -> None:
        """Tell which requests have a row now; they are looked through if one may have got it."""
        scheduler = self._session.scheduler
        counts = len(scheduler.waiting), scheduler.num_preemptions
        if self._waiting and counts != self._looked_at:
            self._looked_at = counts
            for inbox in [inbox for inbox in self._waiting if inbox.has_begun]:
                del self._waiting[inbox]
                self.admission.begun(inbox)

    def _send(self) -> None:
        batches, self._out = self._out, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_receive, batch)
            except RuntimeError:  # the loop is closed: nobody reads any more
                self.abort(*{inbox for inbox, *_ in batch})
        over, self._over = self._over, []
        for inbox in over:
            self.admission.over(inbox)

    def _fail(self, error: BaseException) -> None:
        """Every stream gets what came before, and then the error."""
        self.error = error
        for tap in self._live:
            tap.release()
        self._send()
        self._live.clear()
        self._waiting.clear()
        for inbox in self.admission.close(functools.partial(EngineDeadError, error)):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                inbox.loop.call_soon_threadsafe(inbox.fail, EngineDeadError(error))
            self.admission.over(inbox)

    def _close(self) -> None:
        inboxes, failure = self.admission.close(DrainingError), None
        try:
            self._session.close()
        except BaseException as error:
            failure = error
        self._live.update({tap: inbox for inbox in inboxes for tap in inbox.taps})
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
    for inbox, tap, arrival in batch:
        inbox.receive(tap, arrival)
