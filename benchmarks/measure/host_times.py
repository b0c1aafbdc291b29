"""Times of the host while an engine serves: its stages by step, and each thread's time."""

import bisect
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.engine import Engine, StepTimes

STAGES = "plan", "dispatch", "wait", "collect", "between"
Seconds = dict[str, list[float]]


class HostWatch:
    """Measures an engine's host between `begin` and `end`, which any thread may call."""

    def __init__(self, engine: Engine):
        """Watch `engine`, which can have no other trace meanwhile."""
        self._engine = engine

    def begin(self) -> None:
        """Start a measurement."""
        self._cpu = cpu_seconds()
        self._engine.trace = self._steps = list[StepTimes]()

    def end(self) -> dict[str, Any]:
        """Seconds of each stage of each step, and of processors by thread."""
        self._engine.trace = None
        cpu = {name: after - self._cpu.get(name, 0.0) for name, after in cpu_seconds().items()}
        return {"stages": stages(self._steps), "cpu": cpu}


def stages(steps: Sequence[StepTimes]) -> Seconds:
    """Seconds of each stage; "between" goes from a step's collection to the next one's plan.

    Results are handed on there, and new requests are taken. If the host had nothing to do meanwhile
    that is in it as well.
    """
    begins = sorted(step.plan_start for step in steps)
    nexts = [bisect.bisect(begins, step.collect_end) for step in steps]
    pairs = zip(steps, nexts, strict=True)
    return {
        "plan": [step.dispatch_start - step.plan_start for step in steps],
        "dispatch": [step.dispatch_end - step.dispatch_start for step in steps],
        "wait": [step.collect_start - step.wait_start for step in steps],
        "collect": [step.collect_end - step.collect_start for step in steps],
        "between": [begins[at] - step.collect_end for step, at in pairs if at < len(begins)],
    }


def cpu_seconds() -> dict[str, float]:
    """Processor time of this process ("all") and of its Python threads by name, on Unix."""
    seconds = {"all": time.process_time()}
    for thread in threading.enumerate():
        if thread.ident is None:  # it is about to start
            continue
        clock = time.pthread_getcpuclockid(thread.ident)
        name = thread.name.rstrip("0123456789").rstrip("_-")  # a pool's threads together
        seconds[name] = seconds.get(name, 0.0) + time.clock_gettime(clock)
    return seconds


def figures(runs: Iterable[Seconds]) -> dict[str, float]:
    """The median and the 99th percentile of each stage over all runs, in milliseconds."""
    runs = list(runs)
    found = {}
    for name in STAGES:
        times = [1000 * seconds for run in runs for seconds in run[name]]
        if times:
            found[f"{name}_ms_p50"], found[f"{name}_ms_p99"] = np.percentile(times, (50, 99))
    return {name: float(value) for name, value in found.items()}
