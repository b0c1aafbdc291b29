"""Traces programs in processes of their own, side by side.

To trace and lower a program with kernels is some ten seconds of Python, which runs one thread at a
time. A process gets a request on standard input and answers on standard output; it needs no GPU.
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
    count = min(num_programs, num_cores() - 1, MAX_PROCESSES)
    return count if count > 1 else 0


def num_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class TraceProcesses:
    """Processes that trace programs, one for each; all of them end with `close` or with Python."""

    def __init__(self, count: int):
        """Start none yet; `count` of them may run at a time."""
        self._free = threading.Semaphore(max(1, count))
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.is_closed = False

    def ask(self, request: bytes) -> Future[bytes | None]:
        """Return the answer to a pickled `TraceRequest`, to come.

        It is None where the process failed, and the log has the error.
        """
        answer = Future[bytes | None]()
        # A daemon thread, because Python must not wait for the answer when it exits.
        threading.Thread(
            target=self._answer, args=(request, answer), name="jaxspec-trace", daemon=True
        ).start()
        return answer

    def close(self) -> None:
        """End the processes; what they were asked is answered with None."""
        self.is_closed = True  # first: an interrupt may come while the lock is waited for
        with self._lock:
            for process in self._processes:
                process.kill()  # does nothing to one that has ended
                process.wait()
        atexit.unregister(self.close)

    def _answer(self, request: bytes, answer: Future[bytes | None]) -> None:
        try:
            with self._free:
                process = self._start()
                content = process and _answer(process, request)
        except Exception as error:  # whatever it is, the program can be traced elsewhere
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
        """Return the answer for a program, to come, or None if it was not asked."""
        return self._answers.get(fingerprint) if fingerprint else None

    @property
    def is_closed(self) -> bool:
        """True once what was not answered has ended."""
        return self._processes.is_closed

    def close(self) -> None:
        """End what is not answered yet."""
        self._processes.close()


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
