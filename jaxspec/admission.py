"""Admission: how many requests are there and wait for a row, and whether one more may come."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator

from jaxspec.arrivals import Receiver
from jaxspec.async_errors import DrainingError, QueueFullError
from jaxspec.checks import integer


class Admission:
    """Counts requests from their first moment to their last; any thread may call.

    preparing      its prompt is tokenized
    queued         it waits for a row; it may be preempted later, and is not queued then
    unfinished     queued, or it runs
    """

    def __init__(self, max_num_queued_reqs: int | None, max_num_queued_tokens: int | None):
        """Nobody is there. None: no limit.

        Raises:
            ValueError: a limit is no integer of at least 1.
        """
        self._max_reqs = _limit("max_num_queued_reqs", max_num_queued_reqs)
        self._max_tokens = _limit("max_num_queued_tokens", max_num_queued_tokens)
        self._lock = threading.Lock()
        self._num_preparing = 0
        self._queued: dict[Receiver, int] = {}  # with the tokens of its prompt
        self._unfinished: dict[Receiver, None] = {}
        self._why_not: Callable[[], Exception] | None = None  # why no request may come any more
        self._is_closed = False  # nor those that are being prepared
        self._idle = list[concurrent.futures.Future[None]]()  # of those who wait for the last

    @property
    def num_waiting(self) -> int:
        """Requests that had no row yet."""
        return self._num_preparing + len(self._queued)

    @property
    def num_unfinished(self) -> int:
        """Requests that were taken and have not ended."""
        return self._num_preparing + len(self._unfinished)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Within the block a request is made ready.

        Raises:
            QueueFullError: too many wait.
            DrainingError, EngineDeadError: no more may come.
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
        """Count a request that is ready, within `preparing`, and hand it on.

        A prompt that is longer than `max_num_queued_tokens` comes in if nobody else waits.

        Raises:
            QueueFullError: too many prompt tokens wait.
            DrainingError, EngineDeadError: it can't come any more.
        """
        num_tokens = len(receiver.taps[0].request.prompt)
        with self._lock:
            self._check_open(not self._is_closed)
            held = sum(self._queued.values())
            if held and self._max_tokens is not None and held + num_tokens > self._max_tokens:
                count = held + num_tokens
                raise QueueFullError("max_num_queued_tokens", self._max_tokens, count)
            self._queued[receiver] = num_tokens
            self._unfinished[receiver] = None
            hand_on()  # Under the lock: `close` then lists every request whose mail was sent.

    def check_open(self) -> None:
        """Refuse to go on once nothing may be admitted any more.

        Raises:
            DrainingError, EngineDeadError: why.
        """
        self._check_open(not self._is_closed)

    def begun(self, receiver: Receiver) -> None:
        """A request has a row."""
        with self._lock:
            self._queued.pop(receiver, None)

    def over(self, receiver: Receiver) -> None:
        """A request has ended, whatever became of it."""
        with self._lock:
            self._queued.pop(receiver, None)
            self._unfinished.pop(receiver, None)
        self._tell_if_idle()

    def drain(self) -> concurrent.futures.Future[None]:
        """Refuse new requests from here on; what is returned is done when all others have ended."""
        idle = concurrent.futures.Future[None]()
        idle.set_running_or_notify_cancel()  # so nobody cancels it
        with self._lock:
            self._why_not = self._why_not or DrainingError
            self._idle.append(idle)
        self._tell_if_idle()
        return idle

    def close(self, why: Callable[[], Exception]) -> list[Receiver]:
        """Refuse all that is not admitted yet, with `why`; the requests that have not ended."""
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
