"""Turns: one thread at a time, and whoever waits has its turn before the last one has another."""

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class Turns:
    """Gives the turn to one thread after the other; an interrupt at any time leaves it free.

    A thread that steps in a loop would take a plain lock again before others wake up. So the next
    in line holds `_next`, and a thread that has just had its turn has to wait for that.
    """

    def __init__(self) -> None:
        """Nobody has the turn."""
        # A signal's handler may call while its thread waits in line: that lock is an RLock too.
        self._turn, self._next = threading.RLock(), threading.RLock()
        self._holder: int | None = None  # the thread that has the turn

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn."""
        return self._holder == threading.get_ident()

    def hold(self, act: Callable[[], _Result]) -> _Result:
        """What `act` returns, done in a turn; the thread must not have it already."""
        return self._held(act, wait=True)  # pyright: ignore[reportReturnType]

    def try_hold(self, act: Callable[[], _Result]) -> _Result | None:
        """What `act` returns, done in a turn; None if that is not free, or is the thread's own.

        The garbage collector may close a stream within a thread's own turn.
        """
        return None if self.is_mine else self._held(act, wait=False)

    def _held(self, act: Callable[[], _Result], *, wait: bool) -> _Result | None:
        """Take the turn, act, and give it back; None if it is not free and we do not `wait`.

        Python hears an interrupt after any call, so also right after the lock was taken. The lock
        knows whether it was, and in a `finally` nothing is heard before the first call is over.
        """
        try:
            with self._next if wait else contextlib.nullcontext():
                is_held = self._turn.acquire(wait)
            if not is_held:
                return None
            self._holder = threading.get_ident()
            try:
                return act()
            finally:
                self._holder = None
        finally:
            try:  # noqa: SIM105 (a call of `suppress` would come before that of `release`)
                self._turn.release()
            except RuntimeError:
                pass  # it was not taken
