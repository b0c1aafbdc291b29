"""PendingOutput: a step's output on its way to the host; nothing else waits for the device."""

import jax
import numpy as np

from jaxspec.plan import StepOutput


class PendingOutput:
    """The packed output of a dispatched step. Its copy to the host begins at once."""

    def __init__(self, packed: jax.Array):
        """Start the copy of `packed`, int32 `[rows, output_layout(K).size]`."""
        packed.copy_to_host_async()
        self._packed = packed

    def result(self) -> StepOutput:
        """Wait for the step, then its output as NumPy arrays."""
        return StepOutput.unpack(np.asarray(self._packed))
