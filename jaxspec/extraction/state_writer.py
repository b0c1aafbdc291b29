"""StateWriter: a thread that writes hidden states to files, and keeps what could not be written."""

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from jaxspec.checks import shown
from jaxspec.extraction.state_file import SampleStates

MAX_BYTES = 2**30  # of samples that wait for the disk; then the engine waits, too
MAX_NAMES = 1000  # of files that are missing
_log = logging.getLogger(__name__)


class StateWriter:
    """Writes one sample after the other, while the engine goes on.

    A sample that can't be written is noted and dropped: generation never fails for it. Where the
    disk is slower than the device for long, `put` waits.
    """

    def __init__(self, write: Callable[[SampleStates], None]):
        """`write(sample)` writes a file, or raises what hinders it."""
        self._write = write
        self._thread = ThreadPoolExecutor(1, "jaxspec-states")
        self._jobs: dict[Future[None], int] = {}  # with the bytes of each
        self.num_saved = self.num_failed = 0
        self.missing: list[str] = []  # the first files that could not be written
        self._is_told = False

    def put(self, sample: SampleStates) -> None:
        """Write `sample` when those before it are written; waits while too many bytes do."""
        while True:
            self._jobs = {job: size for job, size in self._jobs.items() if not job.done()}
            held = sum(self._jobs.values())
            if not held or held + sample.num_bytes <= MAX_BYTES:
                break
            wait(self._jobs, return_when=FIRST_COMPLETED)
        self._jobs[self._thread.submit(self._save, sample)] = sample.num_bytes

    def close(self) -> None:
        """Wait until all is written, and tell the user what is not."""
        self._thread.shutdown()
        if self.num_failed and not self._is_told:
            self._is_told = True
            names = ", ".join(self.missing[:10])
            more = f" and {self.num_failed - 10} more" if self.num_failed > 10 else ""
            _log.error(
                "hidden states: %d of %d files could not be written: %s%s",
                self.num_failed,
                self.num_failed + self.num_saved,
                names,
                more,
            )

    def figures(self) -> dict[str, Any]:
        """How many files were written, wait and are missing, and the names of those."""
        return {
            "num_saved": self.num_saved,
            "num_waiting": sum(not job.done() for job in tuple(self._jobs)),
            "num_failed": self.num_failed,
            "missing": list(self.missing),
        }

    def _save(self, sample: SampleStates) -> None:
        try:
            self._write(sample)
            self.num_saved += 1
        except Exception as error:  # whatever it is, the other samples shall be written
            self.num_failed += 1
            if len(self.missing) < MAX_NAMES:
                self.missing.append(sample.file_name)
            if self.num_failed == 1:
                _log.error(
                    "hidden states: those of request %s, sample %d, could not be written: %s. "
                    "Generation goes on; LLM.metrics()['hidden_states'] has the files that are "
                    "missing, and close() tells them, too.",
                    shown(sample.request_id),
                    sample.index,
                    error,
                )
