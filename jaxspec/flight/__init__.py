"""Flight: what an engine was told and what it answered, step by step, so that it can run again.

A step is a pure function, so plans are all that a repetition needs beside the checkpoint.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from jaxspec.config import StepShapes
from jaxspec.plan import Program

Start = Literal["empty", "idle", "copy"]
"""What the first plan finds: a new state, one in which no row goes on, or the flight's copy."""


@dataclasses.dataclass
class Step:
    """One dispatch."""

    program: Program
    packed: np.ndarray  # int32, `plan_layout(program, shapes)`
    output: np.ndarray | None = None  # int32 `[steps, rows, output_layout(K).size]`
    """None: it was in flight at the end, or failed."""


@dataclasses.dataclass(frozen=True)
class Flight:
    """The plans since `start`, in order."""

    about: dict[str, Any]  # the model, its options, versions and device, as JSON has them
    shapes: StepShapes
    start: Start
    steps: list[Step]
    state: list[np.ndarray] | None = None  # leaves of the `EngineState`, if `start` is "copy"
    failure: str | None = None  # the error that ended it
    hashed: bool = False  # token ids are made up
