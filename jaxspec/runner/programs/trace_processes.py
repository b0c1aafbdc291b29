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
_WORKER = (
    "import sys; sys.path[:] = sys.argv[1:]; from jaxspec.runner.trace_worker import main; main()"
)


def num_processes(num_programs: int) -> int:
    """How many processes are worth their start, beside this one.

    Without kernels tracing takes less than that.
    """
    if dispatch.kernels_here()[1] is not None or not sys.executable:
        return 0
    count = min(num_programs, (os.cpu_count() or 1) - 1, MAX_PROCESSES)
    return count if count > 1 else 0


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
        running.stop()
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
        except OSError as error:
            _log.info("no process traces a program: %s", error)
            return None
        if process is None:
            return None
        with process:
            answer, said = process.communicate(request)
        if process.returncode == 0:
            return answer
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        _log.info("a process that traces a program ended with %s: %s", process.returncode, last)
        return None

    def _start(self) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if self._is_over:
                return None
            self._processes.append(_started())
            return self._processes[-1]

    def stop(self) -> None:
        with self._lock:
            self._is_over = True
            for process in self._processes:
                process.kill()  # does nothing to one that has ended


def _started() -> "subprocess.Popen[bytes]":
    """A process that imports what this one does."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _WORKER, *map(os.path.abspath, sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
