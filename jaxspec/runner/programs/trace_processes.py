"""Traces programs in processes of their own, side by side.

To trace and lower a program with kernels is some ten seconds of Python, which runs one thread at a
time. A process gets a request on standard input and answers on standard output; it needs no GPU.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from jaxspec.pallas import dispatch

_log = logging.getLogger(__name__)
_Key = TypeVar("_Key", bound=Hashable)

MAX_PROCESSES = 8  # each takes about 0.5 GB
TIME_LIMIT = 300.0
"""Seconds that a process may take."""
# What libraries print must not get into the answer, so its descriptor is another one.
_WORKER = (
    "import os, sys; answer = os.dup(1); os.dup2(2, 1); sys.path[:] = sys.argv[1:]; "
    "from jaxspec.runner.trace_worker import main; main(answer)"
)


def num_processes(num_programs: int) -> int:
    """How many processes are worth their start, beside this one.

    None where no kernel runs: there, tracing a program takes less than starting a process. None in
    a frozen application either, which is no Python that could be started.
    """
    if dispatch.kernels_here()[1] is not None or not sys.executable or hasattr(sys, "frozen"):
        return 0
    count = min(num_programs, _num_cores() - 1, MAX_PROCESSES)
    return count if count > 1 else 0


def _num_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def answering(
    requests: Mapping[_Key, bytes], count: int
) -> Iterator[Iterator[tuple[_Key, bytes | None]]]:
    """What `count` processes at a time answer to the requests, in the order in which they end.

    None: the process failed, and why is in the log. All of them end with the block.
    """
    running = _Running()
    pool = ThreadPoolExecutor(max(1, count), "jaxspec-trace")
    try:
        asked = {pool.submit(running.ask, request): key for key, request in requests.items()}
        yield ((asked[future], future.result()) for future in as_completed(asked))
    finally:
        try:
            running.stop()
        finally:
            pool.shutdown(cancel_futures=True)


class _Running:
    """The processes that were started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over = False

    def ask(self, request: bytes) -> bytes | None:
        try:
            process = self._start()
            return process and _answer(process, request)
        except Exception as error:  # whatever it is, the program can be traced elsewhere
            _log.info("no process traces a program: %r", error)
            return None

    def _start(self) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if self._is_over:
                return None
            self._processes.append(_started())
            return self._processes[-1]

    def stop(self) -> None:
        self._is_over = True  # first: an interrupt may come while the lock is waited for
        with self._lock:
            for process in self._processes:
                process.kill()  # does nothing to one that has ended


def _started() -> "subprocess.Popen[bytes]":
    """A process that imports from where this one does."""
    folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _WORKER, *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _answer(process: "subprocess.Popen[bytes]", request: bytes) -> bytes | None:
    with process:
        try:
            answer, said = process.communicate(request, TIME_LIMIT)
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return answer
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    _log.info("a process that traces a program ended with %s: %s", process.returncode, last)
    return None
