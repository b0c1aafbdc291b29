"""A step's output: the device writes it, and `PendingOutput` alone waits for it."""

import time
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.layout import PackedLayout
from jaxspec.plan import StepOutput
from jaxspec.sampler import LOGPROBS, PROMPT_LOGPROBS, Sampler


def pack_output(layout: PackedLayout, /, **fields: Array) -> Int[Array, "rows fields"]:
    """A step's rows of the packed output, from every field of `layout` (see `output_layout`)."""
    return jnp.concatenate([layout.bits(name, fields[name]) for name in layout.fields], axis=1)


class DeviceOutput(NamedTuple):
    """What a program gives: an array for all, and one for each thing that its sampler reports."""

    packed: Any  # int32 [steps, rows, output_layout(K).size]
    logprobs: Any = None  # as `StepOutput`'s
    prompt_logprobs: Any = None  # as `StepOutput`'s

    @staticmethod
    def structure(sampler: Sampler) -> "DeviceOutput":
        """The output of programs with such a sampler, with a leaf in place of each array."""
        return DeviceOutput(
            packed=0,
            logprobs=0 if LOGPROBS in sampler else None,
            prompt_logprobs=0 if PROMPT_LOGPROBS in sampler else None,
        )


class PendingOutput:
    """The output of a dispatch, which puts it into the host's memory."""

    def __init__(self, output: DeviceOutput, layout: PackedLayout, watcher: Executor | None = None):
        """`layout` is `output_layout(K)`. A `watcher` (one thread, for traces) notes when the step
        was done.
        """
        self._packed, *self._reports = output
        for report in self._reports:
            if isinstance(report, jax.Array):
                report.copy_to_host_async()  # `result` would begin each copy after the one before
        self._layout = layout
        self._done: Future[float] | None = (
            watcher.submit(_time_when_done, self._packed) if watcher else None
        )

    @staticmethod
    def empty(layout: PackedLayout) -> "PendingOutput":
        """That of a plan which gives no row anything, and for which nobody need wait."""
        return PendingOutput(DeviceOutput(np.zeros((0, 0, layout.size), np.int32)), layout)

    def result(self) -> StepOutput:
        """Wait for the step, then its output as NumPy arrays."""
        reports = [None if each is None else np.asarray(each) for each in self._reports]
        return StepOutput.unpack(np.asarray(self._packed), self._layout, *reports)

    def done_time(self) -> float | None:
        """When the device was done with the step (`time.perf_counter`); None if unwatched."""
        return self._done.result() if self._done else None


def _time_when_done(packed: jax.Array) -> float:
    packed.block_until_ready()
    return time.perf_counter()
