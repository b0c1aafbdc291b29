"""Groups of nodes in processes of their own, on CPU devices."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("node_program.py")
SECONDS = 480  # far more than a busy machine needs


class NodeProcess:
    """A process whose output is read as it comes."""

    def __init__(self, words: Sequence[str], **variables: str):
        # A collective holds one of XLA's threads per device (NPROC) until all have come.
        own = {"PYTHONPATH": str(ROOT), "NPROC": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **own, **variables},
            cwd=ROOT,
        )
        self.lines = list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)

    def wait_for(self, text: str, seconds: float = SECONDS) -> str:
        """Return the first line that contains `text`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            is_over = self.process.poll() is not None
            if is_over:
                self._reader.join(10)
            if found := [line for line in self.lines if text in line]:
                return found[0]
            assert not is_over, f"no {text!r} in {self.text}"
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} in {self.text}")

    def wait(self, seconds: float = SECONDS) -> int:
        """Return the exit status."""
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def answers(self) -> list[dict]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]


@contextlib.contextmanager
def processes(*commands: Sequence[str], **variables: str) -> Iterator[list[NodeProcess]]:
    """Start processes, and kill those that are left at the end."""
    started = list[NodeProcess]()
    try:
        for words in commands:
            started.append(NodeProcess(words, **variables))
        yield started
    finally:
        for each in started:
            each.process.kill()
        for each in started:
            each.wait()


def group(
    *given: dict, devices: int = 1, **variables: str
) -> contextlib.AbstractContextManager[list[NodeProcess]]:
    """Start a node for each of `given`, which have `model`, `options` and for node 0 `calls`."""
    filled = [{"calls": [], "devices": devices, **each} for each in given]
    commands = [
        [str(PROGRAM), str(rank), json.dumps(each, default=str)] for rank, each in enumerate(filled)
    ]
    return processes(*commands, **variables)
