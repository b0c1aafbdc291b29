"""Turn: what one thread has at a time, while others wait in line."""

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class Turn:
    """A lock that a thread gives back to those who wait, however soon it wants it again.

    A thread that steps in a loop would take a plain lock again before others wake up. So the next
    in line holds `_next`, and a thread that has just had its turn has to wait for that.
    """

    def __init__(self) -> None:
        """Nobody has it."""
        # A signal's handler may call while its thread waits in line: that lock is an RLock too.
        self._turn, self._next = threading.RLock(), threading.RLock()
        self._holder: int | None = None  # the thread that has it

    @property
    def is_mine(self) -> bool:
        """Whether the thread that asks has it."""
        return self._holder == threading.get_ident()

    def hold(self, act: Callable[[], _Result], *, wait: bool = True) -> _Result | None:
        """Take the turn, act, and give it back; None if it is not free and we do not `wait`.

        None, too, for a thread that has it already, as where the garbage collector closes a stream.

        Python hears an interrupt after any call, so also right after the lock was taken. The lock
        knows whether it was, and in a `finally` nothing is heard before the first call is over.
        """
        me = threading.get_ident()
        if self._holder == me:
            return None
        try:
            with self._next if wait else contextlib.nullcontext():
                is_held = self._turn.acquire(wait)
            if not is_held:
                return None
            self._holder = me
            try:
                return act()
            finally:
                self._holder = None
        finally:
            try:  # noqa: SIM105 (a call of `suppress` would come before that of `release`)
                self._turn.release()
            except RuntimeError:
                pass  # it was not taken
