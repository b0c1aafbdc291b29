"""PendingOutput: a dispatch's output that the device may still owe; nothing else waits for it."""

import time
from concurrent.futures import Executor, Future

import jax
import numpy as np

from jaxspec.plan import StepOutput


class PendingOutput:
    """The packed output of a dispatch, which puts it into the host's memory."""

    def __init__(self, packed: jax.Array, watcher: Executor | None = None):
        """`packed`: int32 `[steps, rows, output_layout(K).size]`.

        A `watcher` (one thread, for traces) notes when the step was done.
        """
        self._packed = packed
        self._done: Future[float] | None = (
            watcher.submit(_time_when_done, packed) if watcher else None
        )

    def result(self) -> StepOutput:
        """Wait for the step, then its output as NumPy arrays."""
        return StepOutput.unpack(np.asarray(self._packed))

    def done_time(self) -> float | None:
        """When the device was done with the step (`time.perf_counter`); None if unwatched."""
        return self._done.result() if self._done else None


def _time_when_done(packed: jax.Array) -> float:
    packed.block_until_ready()
    return time.perf_counter()
