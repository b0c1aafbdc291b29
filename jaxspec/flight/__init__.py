"""Flight: the recorded plans and outputs of an engine, step by step, for a replay.

A step is a pure function, so plans are all that a replay needs in addition to the checkpoint.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from jaxspec.plan.plan import AnyProgram
from jaxspec.plan.step_shapes import StepShapes

Start = Literal["empty", "idle", "copy"]
"""State before the first plan: new, without rows that continue, or the flight's copy."""


@dataclasses.dataclass
class Step:
    """One dispatch."""

    program: AnyProgram
    packed: np.ndarray  # int32, `plan_layout(program, shapes)`
    output: np.ndarray | None = None  # int32 `[steps, rows, output_layout(K).size]`
    """None if the dispatch failed, or was in flight at the end."""


@dataclasses.dataclass(frozen=True)
class Flight:
    """Plans since `start`, in order, with their outputs."""

    about: dict[str, Any]  # model, options, versions and device, in JSON's types
    shapes: StepShapes
    start: Start
    steps: list[Step]
    state: list[np.ndarray] | None = None  # leaves of the `EngineState`, if `start` is "copy"
    failure: str | None = None  # error that ended the recording
    hashed: bool = False  # True if token ids are replaced by made-up ones
