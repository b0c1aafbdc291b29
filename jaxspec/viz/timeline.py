"""Timeline of steps: spans of host and device work, for plots and pages."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.engine.engine import StepTimes
from jaxspec.plan.plan import AfterForwardPass, Program

STAGES = {
    "plan": ("#3b6fb6", "host: plan"),
    "dispatch": ("#e08a2e", "host: dispatch"),
    "wait": ("#d9d9d9", "host: wait for the device"),
    "collect": ("#8a4fa3", "host: collect"),
    "device": ("#3a9d5d", "device: run"),
}
"""Colour and description of each stage of a step."""


class Span(NamedTuple):
    """Stage of a step, in seconds since the first shown step was planned."""

    stage: str  # a key of `STAGES`
    start: float
    end: float
    is_certain: bool = True  # False if the device may not have begun yet


class StepRow(NamedTuple):
    name: str
    spans: list[Span]


def rows_of(
    steps: Sequence[StepTimes], *, first: int = 0, count: int = 12, num_before: int = 0
) -> list[StepRow]:
    """Return the rows of `count` steps from index `first` on; fewer if there are fewer steps.

    The end of a step on the device is measured by a Python thread; its start is not measured. Its
    span begins at the end of its dispatch or of the step before, whichever is later. An uncertain
    span precedes it, from the earliest possible start.

    `num_before` is the number of steps before `steps`; step names count them too.
    """
    shown = steps[first : first + count]
    if not shown:
        return []
    origin = shown[0].plan_start
    device_free = (steps[first - 1].device_end if first else None) or origin
    rows = list[StepRow]()
    for number, step in enumerate(shown, num_before + first):
        spans = [
            Span("plan", step.plan_start, step.dispatch_start),
            Span("dispatch", step.dispatch_start, step.dispatch_end),
            Span("wait", step.wait_start, step.collect_start),
            Span("collect", step.collect_start, step.collect_end),
        ]
        if step.device_end is not None:
            earliest = max(step.dispatch_start, device_free)
            start = min(max(step.dispatch_end, device_free), step.device_end)
            spans.append(Span("device", earliest, start, is_certain=False))
            spans.append(Span("device", start, step.device_end))
            device_free = step.device_end
        rows.append(StepRow(_name(number, step), [_since(origin, span) for span in spans]))
    return rows


def _since(origin: float, span: Span) -> Span:
    return span._replace(start=span.start - origin, end=span.end - origin)


def _name(number: int, step: StepTimes) -> str:
    program, what = step.program, ""
    if not isinstance(program, Program):
        what = " (copies)"
    elif isinstance(program, AfterForwardPass):
        what = " (halves)"
    elif program.prefill_tokens:
        what = " (prompt)"
    elif program.num_steps > 1:
        what = f" ({program.num_steps} steps)"
    return f"step {number}{what}"
