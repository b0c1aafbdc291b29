"""Calls in several threads, of which one that hangs fails its test; and Ctrl-C within one."""

import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def ctrl_c_after(seconds: float, *, heard_within: float):
    """The block must be ended by a Ctrl-C, and soon enough; both are counted from its start."""
    main = threading.main_thread().ident
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    # A shell starts what it runs in the background with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < heard_within


def stacks() -> str:
    """The innermost frames of each other thread, a line for a thread."""
    frames = sys._current_frames()
    lines = []
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        found = traceback.extract_stack(frames[thread.ident or 0])[-8:]
        places = [f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in reversed(found)]
        lines.append(f"{thread.name}: {' < '.join(places)}")
    return "\n".join(lines)


def in_threads(*calls: Callable[[], Any], seconds: float = 120) -> list[Any]:
    """What each call returned, each made in a thread of its own; raises what the first raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def make(index: int) -> None:
        try:
            start.wait()
            results[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    # Daemons: a thread that hangs must not keep the process from ending.
    threads = [threading.Thread(target=make, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return results
