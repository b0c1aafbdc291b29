"""Arguments of the logits processors of one state slot.

A separate plan (`plan.PROCESSOR_ARGS`) writes them beside the sampling tables (`table_plan`), for
every request that has such tables. Imports no JAX.
"""

import functools

import numpy as np

from jaxspec.layout import Field, PackedLayout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.logits_processors import ProcessorArgs
from jaxspec.requests.request import Request


@functools.cache
def processor_layout(shapes: StepShapes) -> PackedLayout:
    """Return the layout of a plan that writes the arguments of a slot."""
    params = (shapes.processor_params,)
    return PackedLayout(
        [
            Field("slot", "Slot of the tables; 0 writes none."),
            Field("used", "A bit for each processor that the request uses."),
            Field("params", "Arguments of all processors.", shape=params, dtype=np.float32),
        ]
    )


def pack_processor_args(request: Request, shapes: StepShapes) -> np.ndarray:
    """Return the packed plan (int32) for a request that has a slot and enters the batch."""
    layout = processor_layout(shapes)
    packed = np.zeros(layout.size, np.int32)
    fields = layout.unpack(packed)
    args = request.processor_args or ProcessorArgs()
    fields["slot"][...] = request.slot
    fields["used"][...] = args.used
    fields["params"][: len(args.values)] = args.values
    return packed
