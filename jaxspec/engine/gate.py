"""`Gate`: the reasons for which an engine takes no steps."""

import threading
from typing import Literal

from jaxspec.engine.errors import AsleepError, PausedError

Part = Literal["weights", "kv_cache"]
"""A part of the device memory that is freed while an engine sleeps."""
Reason = Literal["pause", "drain", Part]
_POLL = 0.05  # seconds


class Gate:
    """Stops the steps of an engine while there is a reason.

    It is closed and opened within turns of the session; any thread may read it or wait.
    """

    def __init__(self) -> None:
        """Start open."""
        self._closers: dict[Reason, threading.Thread] = {}
        self._refusing: set[Reason] = set()
        self._opened = threading.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return not self._closers

    def is_closed_by(self, *reasons: Reason) -> bool:
        """Return whether one of `reasons` is a reason now."""
        return not self._closers.keys().isdisjoint(reasons)

    def refuse(self, *reasons: Reason) -> None:
        """Refuse new requests until it is opened for the reasons; others still run."""
        self._refusing.update(reasons)

    def admit(self, *reasons: Reason) -> None:
        """Undo `refuse`."""
        self._refusing.difference_update(reasons)

    def close(self, *reasons: Reason) -> None:
        self._opened.clear()
        self._closers |= dict.fromkeys(reasons, threading.current_thread())

    def open(self, *reasons: Reason) -> None:
        """Remove reasons; the gate is open once none is left."""
        self.admit(*reasons)
        for reason in reasons:
            self._closers.pop(reason, None)
        if not self._closers:
            self._opened.set()

    @property
    def is_refusing(self) -> bool:
        """True if new requests are refused."""
        return bool(self._refusing)

    @property
    def is_closed_here(self) -> bool:
        """True if the calling thread closed it."""
        return threading.current_thread() in list(self._closers.values())

    def wait(self) -> None:
        """Wait until it is open, but only a moment, since the caller's requests may be aborted.

        Raises:
            PausedError: the calling thread itself closed it, and would wait for itself.
        """
        if self.is_closed_here:
            raise PausedError(
                "The thread that paused an LLM can't wait for its requests, which would never "
                f"end. Call {self._way_out()} first, or generate in another thread."
            )
        if self._closers:  # an interrupt of `open` may have left the event unset
            self._opened.wait(_POLL)

    def check_admits(self) -> None:
        """Raise PausedError if new requests are refused."""
        if self.is_refusing:
            raise PausedError(
                "New requests are refused, for this LLM was paused with the mode 'wait' or "
                f"'abort'. Call {self._way_out()}, or pause with the mode 'keep'."
            )

    def check_awake(self, *parts: Part) -> None:
        """Raise AsleepError if one of `parts` is freed; without any, if one of all is."""
        if self.is_closed_by(*parts or ("weights", "kv_cache")):
            raise AsleepError(
                "A sleeping LLM has no weights or caches on its devices to compute with. Call "
                "wake_up first; after sleep(2) update_weights, too."
            )

    def _way_out(self) -> str:
        return "wake_up" if self.is_closed_by("weights", "kv_cache") else "resume"
