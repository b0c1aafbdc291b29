"""Parallel tracing of programs in worker processes.

Tracing and lowering a program with kernels takes some ten seconds of Python, which runs one thread
at a time. A worker reads a request from standard input and answers on standard output; it needs no
GPU.
"""

import atexit
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from jaxspec.pallas import dispatch

_log = logging.getLogger(__name__)

MAX_PROCESSES = 8  # each needs about 0.5 GB
TIME_LIMIT = 300.0
"""Time limit of a process, in seconds."""
# The answer has a separate descriptor, so that text printed by libraries does not mix with it.
_WORKER = (
    "import os, sys; answer = os.dup(1); os.dup2(2, 1); sys.path[:] = sys.argv[1:]; "
    "from jaxspec.runner.trace_worker import main; main(answer)"
)


def num_processes(num_programs: int) -> int:
    """Return the number of processes to start; 0 if this process alone would be faster.

    Without kernels, tracing a program takes less time than starting a process. A frozen application
    has no Python interpreter to start.
    """
    if dispatch.kernels_here()[1] is not None or not sys.executable or hasattr(sys, "frozen"):
        return 0
    count = min(num_programs, num_cores() - 1, MAX_PROCESSES)
    return count if count > 1 else 0


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class TraceProcesses:
    """Worker processes, one per program; killed by `close` and at interpreter exit."""

    def __init__(self, count: int):
        """Allow `count` processes at a time; none is started yet."""
        self._free = threading.Semaphore(max(1, count))
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.is_closed = False

    def ask(self, request: bytes) -> Future[bytes | None]:
        """Return a future for the answer to a pickled `TraceRequest`.

        Its result is None if the process failed; the error is logged.
        """
        answer = Future[bytes | None]()
        # A daemon thread, so that the interpreter does not wait for the answer at exit.
        threading.Thread(
            target=self._answer, args=(request, answer), name="jaxspec-trace", daemon=True
        ).start()
        return answer

    def close(self) -> None:
        """Kill the processes; pending requests are answered with None."""
        self.is_closed = True  # first, since an interrupt may come while waiting for the lock
        with self._lock:
            for process in self._processes:
                process.kill()  # no effect on a finished process
                process.wait()
        atexit.unregister(self.close)

    def _answer(self, request: bytes, answer: Future[bytes | None]) -> None:
        try:
            with self._free:
                process = self._start()
                content = process and _answer(process, request)
        except Exception as error:  # the program will be traced in this process
            _log.info("no process traces a program: %r", error)
            content = None
        answer.set_result(content)

    def _start(self) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if self.is_closed:
                return None
            if not self._processes:
                atexit.register(self.close)
            self._processes.append(_started())
            return self._processes[-1]


class EarlyTraces:
    """Programs that processes trace while the weights are read."""

    def __init__(self, requests: Mapping[str, bytes]):
        """Start with pickled requests by the fingerprint of their program."""
        self._processes = TraceProcesses(len(requests))
        self._answers = {key: self._processes.ask(each) for key, each in requests.items()}

    def get(self, fingerprint: str | None) -> Future[bytes | None] | None:
        """Return the future of a program's answer, or None if it was not requested."""
        return self._answers.get(fingerprint) if fingerprint else None

    @property
    def is_closed(self) -> bool:
        return self._processes.is_closed

    def close(self) -> None:
        self._processes.close()


def _started() -> "subprocess.Popen[bytes]":
    """Start a worker with the import path of this process."""
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
