"""Output of a step, packed on the device, and `PendingOutput`, which waits for it on the host."""

import time
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.layout import PackedLayout
from jaxspec.plan.plan import StepOutput
from jaxspec.requests.sampling_features import LOGPROBS, PROMPT_LOGPROBS, SamplingFeatures


def pack_output(layout: PackedLayout, /, **fields: Array) -> Int[Array, "rows fields"]:
    """Pack all fields of `layout` (see `output_layout`) into the rows of a step's output."""
    return jnp.concatenate([layout.bits(name, fields[name]) for name in layout.fields], axis=1)


class DeviceOutput(NamedTuple):
    """Output arrays of a program; optional ones exist if its sampling features report them."""

    packed: Any  # int32 [steps, rows, output_layout(K).size]
    logprobs: Any = None  # see `StepOutput.logprobs`
    prompt_logprobs: Any = None  # see `StepOutput.prompt_logprobs`

    @staticmethod
    def structure(features: SamplingFeatures) -> "DeviceOutput":
        """Return the pytree structure of the outputs of programs with these features."""
        return DeviceOutput(
            packed=0,
            logprobs=0 if LOGPROBS in features else None,
            prompt_logprobs=0 if PROMPT_LOGPROBS in features else None,
        )


class PendingOutput:
    """Output of a dispatch, on its way to host memory."""

    def __init__(self, output: DeviceOutput, layout: PackedLayout, watcher: Executor | None = None):
        """Start the copies to the host.

        Args:
            output: Output of the program.
            layout: Layout of its rows, `output_layout(K)`.
            watcher: Executor with one thread, in which the time of completion is measured.
        """
        self._packed, *self._reports = output
        for report in self._reports:
            if isinstance(report, jax.Array):
                report.copy_to_host_async()  # all at once; `result` would copy one after another
        self._layout = layout
        self._done: Future[float] | None = (
            watcher.submit(_time_when_done, self._packed) if watcher else None
        )

    @staticmethod
    def empty(layout: PackedLayout) -> "PendingOutput":
        """Return the output of a plan without rows, which is ready at once."""
        return PendingOutput(DeviceOutput(np.zeros((0, 0, layout.size), np.int32)), layout)

    def result(self) -> StepOutput:
        """Wait for the step and return its output as NumPy arrays."""
        reports = [None if each is None else np.asarray(each) for each in self._reports]
        return StepOutput.unpack(np.asarray(self._packed), self._layout, *reports)

    def done_time(self) -> float | None:
        """Return the `time.perf_counter` of the step's completion; None without a watcher."""
        return self._done.result() if self._done else None


def _time_when_done(packed: jax.Array) -> float:
    packed.block_until_ready()
    return time.perf_counter()
