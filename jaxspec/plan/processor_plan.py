"""Arguments of logits processors: those of one state slot, and the newest tokens before its entry.

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
    params, recent = (shapes.processor_params,), (shapes.processor_tokens,)
    return PackedLayout(
        [
            Field("slot", "Slot of the tables; 0 writes none."),
            Field("used", "A bit for each processor that the request uses."),
            Field("params", "Arguments of all processors.", shape=params, dtype=np.float32),
            Field("recent", "Newest tokens; token `i` is at `i % length`, or -1.", shape=recent),
        ]
    )


def pack_processor_args(request: Request, shapes: StepShapes) -> np.ndarray:
    """Return the packed plan (int32) for a request that has a slot and enters the batch.

    Steps add only the tokens that they compute, so those of a cached prefix are written here.
    """
    layout = processor_layout(shapes)
    packed = np.zeros(layout.size, np.int32)
    fields = layout.unpack(packed)
    args = request.processor_args or ProcessorArgs()
    fields["slot"][...] = request.slot
    fields["used"][...] = args.used
    fields["params"][: len(args.values)] = args.values
    recent, end = fields["recent"], request.num_computed
    recent[:] = -1
    index = np.arange(max(0, end - len(recent)), end)
    recent[index % len(recent)] = request.tokens[max(0, end - len(recent)) : end]
    return packed
