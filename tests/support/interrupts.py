"""Interrupts at every place: an exception in the middle of what the host does, as Ctrl-C comes."""

import contextlib
import gc
import inspect
import sys
from collections import deque
from pathlib import Path

import jaxspec

PACKAGE = Path(jaxspec.__file__).parent
# Whose functions are interrupted.
FILES = {
    str(path)
    for path in (
        PACKAGE / "engine" / "session.py",
        PACKAGE / "engine" / "engine.py",
        PACKAGE / "engine" / "gate.py",
        PACKAGE / "api" / "pausing.py",
        PACKAGE / "api" / "weight_updates.py",
        PACKAGE / "requests" / "waiting_queue.py",
        *(PACKAGE / "prefix").glob("*.py"),
        *(PACKAGE / "scheduler").glob("*.py"),
        Path(contextlib.__file__),
    )
}


class CtrlC(KeyboardInterrupt):
    """The user's."""


class NoMemory(MemoryError):
    """The host's."""


class DeviceGone(RuntimeError):
    """The device's; the runner raises it."""


INTERRUPTS = (CtrlC, NoMemory, DeviceGone)


class Interrupter:
    """Raises planned exceptions within `FILES`, each so many places after the one before.

    A place is where a function begins, and where it calls or comes back from a builtin: CPython
    looks for signals at the start of functions and on return from builtins, and builtins run out of
    memory. Only what gives a lock back does not fail before it is done.
    """

    def __init__(self):
        """Start with nothing planned."""
        self._planned: deque[list] = deque()  # places left, counted once it is the first; the error
        self._is_running = False

    def plan(self, places, error, *, first=False):
        """Raise `error` so many places after those that were planned, or before them all."""
        (self._planned.appendleft if first else self._planned.append)([places, error])
        if self._is_running:
            self._watch()

    def cancel(self):
        """Raise no more."""
        self._planned.clear()

    def run(self, call):
        """What `call` returns; raises what is planned once it gets to the place."""
        profile, trace = sys.getprofile(), sys.gettrace()
        gc.disable()  # an exception in a callback of the collector's would be lost
        self._is_running = True
        try:
            if self._planned:
                self._watch()
            return call()
        finally:
            sys.setprofile(profile)
            sys.settrace(trace)
            self._is_running = False
            gc.enable()

    @contextlib.contextmanager
    def away(self):
        """Nothing is raised within, and nobody looks, which takes time."""
        profile, trace = sys.getprofile(), sys.gettrace()
        sys.settrace(None)
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.settrace(trace)
            sys.setprofile(profile)

    def _watch(self):
        sys.settrace(self._on_call)
        sys.setprofile(self._on_place)

    def _on_call(self, frame, event, argument):
        """Python takes a profiler away that raises: the next function that begins puts it back."""
        if self._planned and sys.getprofile() is None:
            sys.setprofile(self._on_place)

    def _on_place(self, frame, event, argument):
        code = frame.f_code
        if code.co_filename not in FILES or not self._planned or event in ("return", "c_exception"):
            return
        if event == "call" and code.co_flags & inspect.CO_GENERATOR:
            return  # from here an error would skip the `finally` of one that goes on
        if event == "c_call" and argument.__name__ in ("release", "__exit__"):
            return
        first = self._planned[0]
        first[0] -= 1
        if first[0] < 0:
            del first
            raise self._planned.popleft()[1]  # no name: its traceback would refer to itself
