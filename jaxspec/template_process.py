"""TemplateProcess: renders chat templates in a process of their own, within limits.

A template comes with a checkpoint and is a program. Jinja2's sandbox keeps it from files and from
Python's objects, but not from running for ever or filling the memory. So it runs apart, in
`template_worker.py`, which may be ended at any time.
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TIME_LIMIT = 5.0
"""Seconds that a template may take, the start of the process counted in."""
TURNS_TIME_LIMIT = 1.0
"""Seconds that it may take besides for all the turns that are tried."""
MAX_CHARACTERS = 2**23
"""The longest text that a template may write: some 2 million tokens."""
MAX_MEMORY = 2**30
"""Bytes of memory that the process may map, where the system can bound that."""
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateFailure(Exception):
    """Why a template gave no text, as the second half of a sentence: "it took more than 5 s"."""


class Rendered(NamedTuple):
    """What a template wrote."""

    text: str
    num_kept: tuple[int, ...]  # characters of it that stay if a turn comes, by turn


class TemplateProcess:
    """A process that is started by the first template, and ends with this object or with Python.

    Any thread may call it, and a forked process starts one of its own.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end = None  # ends it, also when Python does
        _ALL.add(self)

    def render(
        self,
        source: str,
        variables: Mapping[str, Any],
        turns: Sequence[Sequence[Mapping[str, Any]]] = (),
    ) -> Rendered:
        """What the template `source` writes with these variables, which are JSON's values.

        And how much of it stays if the messages of a turn come behind those of `variables`, for
        each of `turns`: 0 where the template takes no such turn, or takes too long for it.

        Raises:
            TemplateFailure: the template failed, or went beyond a limit.
        """
        limits = {"seconds": TIME_LIMIT + TURNS_TIME_LIMIT, "characters": MAX_CHARACTERS}
        asked = {"source": source, "variables": variables, "turns": turns, **limits}
        request = json.dumps(asked).encode()
        with self._lock:
            try:
                is_text, text = self._text(request)
                kept = self._num_kept(len(turns)) if is_text and turns else ()
            except BaseException:  # an interrupt too: what comes would be taken for the next one's
                self._stop()
                raise
        if not is_text:
            raise TemplateFailure(text)
        return Rendered(text, kept)

    def _text(self, request: bytes) -> tuple[bool, str]:
        """Whether the answer is the template's text, and the answer."""
        process = self._running()
        answer, is_late = _within(TIME_LIMIT, process, lambda: _exchange(process, request))
        if is_late:
            raise TemplateFailure(f"it took more than {TIME_LIMIT:g} seconds")
        if answer is None:
            self._stop()
            status = process.returncode
            raise TemplateFailure(f"the process that renders it ended with status {status}")
        return answer[:1] == b"T", answer[1:].decode("utf-8", "surrogatepass")

    def _num_kept(self, count: int) -> tuple[int, ...]:
        """The numbers that follow a text; zeros if they don't come in time."""
        process = self._running()
        numbers, is_late = _within(TURNS_TIME_LIMIT, process, lambda: _read(process, 8 * count))
        if is_late or numbers is None:
            self._stop()
            return (0,) * count
        return tuple(int.from_bytes(numbers[8 * n :][:8], "big") for n in range(count))

    def _running(self) -> "subprocess.Popen[bytes]":
        """The process, started if there is none."""
        if self._process is None:
            command = [sys.executable, "-I", "-S", str(_WORKER), str(MAX_MEMORY), *_folders()]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                raise TemplateFailure(
                    f"the process that renders it could not be started: {error.strerror}"
                ) from error
            self._end = weakref.finalize(self, _end, self._process, os.getpid())
        return self._process

    def _stop(self) -> None:
        end, self._process, self._end = self._end, None, None
        if end is not None:
            end()

    def _forget(self) -> None:
        """Leave the process, and a lock that a thread may hold, to where this was forked from."""
        self._lock = threading.Lock()
        self._process = self._end = None


def _folders() -> list[str]:
    """Where jinja2 and what it needs are; the process looks nowhere else but in Python itself."""
    specs = map(importlib.util.find_spec, ("jinja2", "markupsafe"))
    return [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]


def _within(
    seconds: float, process: "subprocess.Popen[bytes]", read: Callable[[], bytes | None]
) -> tuple[bytes | None, bool]:
    """What `read` gets of the process, and whether that took so long that the process was ended."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(seconds, expire)
    timer.start()
    try:
        found = read()
    finally:
        timer.cancel()
        timer.join()
    return found, expired.is_set()


def _exchange(process: "subprocess.Popen[bytes]", request: bytes) -> bytes | None:
    """The answer; None if the process ends before it has given it."""
    assert process.stdin is not None
    try:
        process.stdin.write(len(request).to_bytes(8, "big") + request)
        process.stdin.flush()
    except OSError:  # a broken pipe
        return None
    head = _read(process, 8)
    if head is None:
        return None
    return _read(process, min(int.from_bytes(head, "big"), 1 + 4 * MAX_CHARACTERS))


def _read(process: "subprocess.Popen[bytes]", size: int) -> bytes | None:
    """So many bytes of what it writes; None if the process ends before."""
    assert process.stdout is not None
    found = process.stdout.read(size)
    return found if len(found) == size else None


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End a process that this one has started."""
    if os.getpid() != owner:  # forked: it is the parent's
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what was written to a broken pipe
            pass
    process.wait()


_ALL: "weakref.WeakSet[TemplateProcess]" = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_ALL):
        one._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
