"""Timeline: what the host and the device did for each of some steps, for those who draw it."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.engine import StepTimes

STAGES = {
    "plan": ("#3b6fb6", "host: plan"),
    "dispatch": ("#e08a2e", "host: dispatch"),
    "wait": ("#d9d9d9", "host: wait for the device"),
    "collect": ("#8a4fa3", "host: collect"),
    "device": ("#3a9d5d", "device: run"),
}
"""The stages of a step: colour, and what each is."""


class Span(NamedTuple):
    """A stage of a step, in seconds since the first step that is drawn was planned."""

    stage: str  # a key of `STAGES`
    start: float
    end: float
    is_certain: bool = True  # False: the device may have begun already, or not yet


class StepRow(NamedTuple):
    """A step: what it is called, and its spans."""

    name: str
    spans: list[Span]


def rows_of(
    steps: Sequence[StepTimes], *, first: int = 0, count: int = 12, num_before: int = 0
) -> list[StepRow]:
    """The rows of `count` steps from number `first` on; fewer where there are no more.

    When a step ends on the device is what a Python thread saw; when it begins nobody tells. Its
    span begins at the end of its dispatch, or of the step before where that is later. An uncertain
    span lies before, from where it may have begun already.

    `num_before`: steps that came before those of `steps`, which names count too.
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
    several = f" ({step.program.num_steps} steps)" if step.program.num_steps > 1 else ""
    several = several if step.program.num_steps else " (copies)"
    return f"step {number}" + (" (prompt)" if step.program.prefill_tokens else several)
