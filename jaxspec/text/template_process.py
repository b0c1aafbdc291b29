"""TemplateProcesses: render chat templates in separate processes with limits of time and memory.

A template is a program from an untrusted checkpoint. The sandbox of Jinja2 denies access to files
and Python objects, but does not bound time or memory. So templates run in `template_worker.py`,
which can be killed at any time.
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
"""Time limit of a template in seconds, including the start of the process."""
TURNS_TIME_LIMIT = 1.0
"""Additional time limit in seconds for all further turns together."""
MAX_CHARACTERS = 2**23
"""Longest text of a template in characters, about 2 million tokens."""
NUM_PROCESSES = 4
"""Most processes; a template that uses up its time holds one of them."""
MAX_MEMORY = 2**30
"""Bytes of memory that a process may map, on systems with such a limit."""
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateFailure(Exception):
    """Failure of a template; its message completes a sentence: "it took more than 5 seconds"."""


class Rendered(NamedTuple):
    text: str
    num_kept: tuple[int, ...]  # for each further turn: number of leading characters it keeps


class TemplateProcesses:
    """Up to `NUM_PROCESSES` worker processes, each started when all others are rendering.

    Rendering is thread-safe; further threads wait for a process.
    """

    def __init__(self) -> None:
        self._idle = list[TemplateProcess]()
        self._places = threading.Semaphore(NUM_PROCESSES)
        _ALL.add(self)

    def render(
        self,
        source: str,
        variables: Mapping[str, Any],
        turns: Sequence[Sequence[Mapping[str, Any]]] = (),
    ) -> Rendered:
        """Render a template in one of the processes, as `TemplateProcess.render` does."""
        with self._places:
            try:
                process = self._idle.pop()
            except IndexError:
                process = TemplateProcess()
            try:
                return process.render(source, variables, turns)
            finally:
                self._idle.append(process)

    def _forget(self) -> None:
        """Give back the places that threads of a forked child's parent hold."""
        self._places = threading.Semaphore(NUM_PROCESSES)


class TemplateProcess:
    """A worker process, started by the first template; it ends with this object or with Python.

    Rendering is thread-safe. A forked child starts another worker.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end = None  # finalizer that ends the process, also at interpreter exit
        _ALL.add(self)

    def render(
        self,
        source: str,
        variables: Mapping[str, Any],
        turns: Sequence[Sequence[Mapping[str, Any]]] = (),
    ) -> Rendered:
        """Render the template `source` with `variables`, which are JSON values.

        For each of `turns` the result also has the number of leading characters that stay the same
        if its messages follow those of `variables`: 0 if the template rejects the turn or takes
        too long.

        Raises:
            TemplateFailure: the template failed or exceeded a limit.
        """
        limits = {"seconds": TIME_LIMIT + TURNS_TIME_LIMIT, "characters": MAX_CHARACTERS}
        asked = {"source": source, "variables": variables, "turns": turns, **limits}
        request = json.dumps(asked).encode()
        with self._lock:
            try:
                is_text, text = self._text(request)
                kept = self._num_kept(len(turns)) if is_text and turns else ()
            except BaseException:  # after an interrupt a late answer would be read as the next one
                self._stop()
                raise
        if not is_text:
            raise TemplateFailure(text)
        return Rendered(text, kept)

    def _text(self, request: bytes) -> tuple[bool, str]:
        """Return whether the template succeeded, and its text or error."""
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
        """Read the numbers after a text; zeros if they are late or missing."""
        process = self._running()
        numbers, is_late = _within(TURNS_TIME_LIMIT, process, lambda: _read(process, 8 * count))
        if is_late or numbers is None:
            self._stop()
            return (0,) * count
        return tuple(int.from_bytes(numbers[8 * n :][:8], "big") for n in range(count))

    def _running(self) -> "subprocess.Popen[bytes]":
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
        """Drop the parent's process after a fork, and a lock that one of its threads may hold."""
        self._lock = threading.Lock()
        self._process = self._end = None


def _folders() -> list[str]:
    """Return the folders of jinja2 and markupsafe, all that the worker adds to its import path."""
    specs = map(importlib.util.find_spec, ("jinja2", "markupsafe"))
    return [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]


def _within(
    seconds: float, process: "subprocess.Popen[bytes]", read: Callable[[], bytes | None]
) -> tuple[bytes | None, bool]:
    """Return the result of `read`, and whether the process was killed after `seconds`."""
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
    """Send a request and return its answer; None if the process ends before."""
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
    """Read `size` bytes of output; None if the process ends before."""
    assert process.stdout is not None
    found = process.stdout.read(size)
    return found if len(found) == size else None


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:  # after a fork the worker belongs to the parent
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # unflushed data of a broken pipe
            pass
    process.wait()


_ALL: "weakref.WeakSet[TemplateProcesses | TemplateProcess]" = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_ALL):
        one._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
