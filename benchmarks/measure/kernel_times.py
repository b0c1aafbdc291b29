"""Times of a GPU's kernels by name, from a profile that JAX wrote."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Profile `run`, which takes `steps` steps; all times are per step.

    Returns `kernels_per_step`, `kernels_ms` (their time), `idle_ms` (between them; more than else,
    as XLA launches each alone under the profiler) and `kernel_ms_by_name`, the longest first.
    Kernels that differ in their number only go by one name. An empty profile, as of a CPU, has no
    kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        events = [
            (event.name, event.start_ns, event.duration_ns)
            for plane in profile.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    times, total = Counter(), 0
    for name, _, duration in events:
        times[re.sub(r"(_\d+)+$", "", name)] += duration
        total += duration
    begin = min((start for _, start, _ in events), default=0)
    end = max((start + duration for _, start, duration in events), default=0)
    milliseconds = 1e-6 / steps
    return {
        "kernels_per_step": len(events) / steps,
        "kernels_ms": total * milliseconds,
        "idle_ms": max(0, end - begin - total) * milliseconds,
        "kernel_ms_by_name": {name: ns * milliseconds for name, ns in times.most_common()},
    }
