"""A step's packed output: the device writes it, and `PendingOutput` alone waits for it."""

import time
from concurrent.futures import Executor, Future

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.layout import PackedLayout
from jaxspec.plan import StepOutput


def pack_output(layout: PackedLayout, /, **fields: Array) -> Int[Array, "rows fields"]:
    """A step's rows of the packed output, from every field of `layout` (see `output_layout`)."""
    return jnp.concatenate([layout.bits(name, fields[name]) for name in layout.fields], axis=1)


class PendingOutput:
    """The packed output of a dispatch, which puts it into the host's memory."""

    def __init__(self, packed: jax.Array, layout: PackedLayout, watcher: Executor | None = None):
        """`packed`: int32 `[steps, rows, layout.size]`, where `layout` is `output_layout(K)`.

        A `watcher` (one thread, for traces) notes when the step was done.
        """
        self._packed, self._layout = packed, layout
        self._done: Future[float] | None = (
            watcher.submit(_time_when_done, packed) if watcher else None
        )

    def result(self) -> StepOutput:
        """Wait for the step, then its output as NumPy arrays."""
        return StepOutput.unpack(np.asarray(self._packed), self._layout)

    def done_time(self) -> float | None:
        """When the device was done with the step (`time.perf_counter`); None if unwatched."""
        return self._done.result() if self._done else None


def _time_when_done(packed: jax.Array) -> float:
    packed.block_until_ready()
    return time.perf_counter()
