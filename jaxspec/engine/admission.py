"""Admission control: counts requests, limits the queue, and refuses requests while draining."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator

from jaxspec.checks import integer
from jaxspec.engine.errors import DrainingError, QueueFullError
from jaxspec.engine.sample_stream import Receiver


class Admission:
    """Counts requests by state and refuses those over the limits. Thread-safe.

    preparing      the prompt is being tokenized
    queued         waits for its first row; a preempted request is not queued again
    unfinished     queued or running
    """

    def __init__(self, max_num_queued_reqs: int | None, max_num_queued_tokens: int | None):
        """Start with no requests; `None` means unlimited.

        Raises:
            ValueError: a limit is not an integer of at least 1.
        """
        self._max_reqs = _limit("max_num_queued_reqs", max_num_queued_reqs)
        self._max_tokens = _limit("max_num_queued_tokens", max_num_queued_tokens)
        self._lock = threading.Lock()
        self._num_preparing = 0
        self._queued: dict[Receiver, int] = {}  # prompt tokens of each request
        self._unfinished: dict[Receiver, None] = {}
        self._why_not: Callable[[], Exception] | None = None  # makes the error of new requests
        self._is_closed = False  # refuses those being prepared, too
        self._idle = list[concurrent.futures.Future[None]]()  # resolved when no request is left

    @property
    def num_waiting(self) -> int:
        """Number of requests being prepared or queued."""
        return self._num_preparing + len(self._queued)

    @property
    def num_unfinished(self) -> int:
        """Number of requests being prepared, queued or running."""
        return self._num_preparing + len(self._unfinished)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request as being prepared within the block.

        Raises:
            QueueFullError: `max_num_queued_reqs` requests are waiting.
            DrainingError, EngineDeadError: new requests are refused.
        """
        with self._lock:
            self._check_open(self._why_not is None)
            count = self.num_waiting + 1
            if self._max_reqs is not None and count > self._max_reqs:
                raise QueueFullError("max_num_queued_reqs", self._max_reqs, count)
            self._num_preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_preparing -= 1
            self._tell_if_idle()

    def admit(self, receiver: Receiver, hand_on: Callable[[], None]) -> None:
        """Count a prepared request as queued and call `hand_on`. Call it within `preparing`.

        A prompt longer than `max_num_queued_tokens` is admitted if no other request is queued.

        Raises:
            QueueFullError: the queued prompts would exceed `max_num_queued_tokens`.
            DrainingError, EngineDeadError: requests are no longer admitted.
        """
        num_tokens = len(receiver.sample_streams[0].request.prompt)
        with self._lock:
            self._check_open(not self._is_closed)
            held = sum(self._queued.values())
            if held and self._max_tokens is not None and held + num_tokens > self._max_tokens:
                count = held + num_tokens
                raise QueueFullError("max_num_queued_tokens", self._max_tokens, count)
            self._queued[receiver] = num_tokens
            self._unfinished[receiver] = None
            hand_on()  # under the lock, so that `close` returns every request passed on

    def check_open(self) -> None:
        """Raise if prepared requests are no longer admitted.

        Raises:
            DrainingError, EngineDeadError: as passed to `close`.
        """
        self._check_open(not self._is_closed)

    def begun(self, receiver: Receiver) -> None:
        """Count a request as running: it got its first row."""
        with self._lock:
            self._queued.pop(receiver, None)

    def over(self, receiver: Receiver) -> None:
        """Remove a finished request from the counts."""
        with self._lock:
            self._queued.pop(receiver, None)
            self._unfinished.pop(receiver, None)
        self._tell_if_idle()

    def drain(self) -> concurrent.futures.Future[None]:
        """Refuse new requests; the returned future is done when all others have finished."""
        with self._lock:
            self._why_not = self._why_not or DrainingError
        return self.idle()

    def idle(self) -> concurrent.futures.Future[None]:
        """Return a future that is done once no request is unfinished."""
        idle = concurrent.futures.Future[None]()
        idle.set_running_or_notify_cancel()  # makes it impossible to cancel
        with self._lock:
            self._idle.append(idle)
        self._tell_if_idle()
        return idle

    def close(self, why: Callable[[], Exception]) -> list[Receiver]:
        """Refuse all requests that are not admitted yet, and return the unfinished ones.

        `why` makes the error of the refused requests.
        """
        with self._lock:
            self._why_not, self._is_closed = why, True
            return list(self._unfinished)

    def _check_open(self, is_open: bool) -> None:
        if not is_open:
            raise (self._why_not or DrainingError)()

    def _tell_if_idle(self) -> None:
        with self._lock:
            told = [] if self.num_unfinished else self._idle
            if told:
                self._idle = []
        for idle in told:
            idle.set_result(None)


def _limit(name: str, value: int | None) -> int | None:
    return None if value is None else integer(name, value, 1, hint="; None is no limit")
