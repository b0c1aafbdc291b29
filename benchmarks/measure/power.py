"""A GPU's clock and power while it works, and whether the power is at its limit."""

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

FIELDS = "clocks.sm", "power.draw.instant", "clocks_event_reasons.active"
POWER_LIMIT = 0x4  # of the reasons: "SW Power Cap"
EVERY_MS = 50


class Sample(NamedTuple):
    """Output of `nvidia-smi` at a time."""

    time: float  # of `time.monotonic`
    sm_clock_mhz: float
    watts: float
    is_at_limit: bool


@contextlib.contextmanager
def sampled() -> Iterator[list[Sample]]:
    """Samples of JAX's first GPU while the block runs; none where there is no `nvidia-smi`."""
    samples: list[Sample] = []
    command = shutil.which("nvidia-smi")
    if command is None:
        yield samples
        return
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    options = f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"
    sampler = subprocess.Popen(
        [command, *options, f"--id={gpu}", f"--loop-ms={EVERY_MS}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    reader = threading.Thread(target=_read, args=(sampler.stdout, samples))
    reader.start()
    try:
        yield samples
    finally:
        with sampler:
            sampler.terminate()
            reader.join()


def _read(lines, samples):
    for line in lines:
        with contextlib.suppress(ValueError):  # a GPU that does not tell, or a line that was cut
            clock, watts, reasons = line.split(", ")
            is_at_limit = int(reasons, 16) & POWER_LIMIT > 0
            samples.append(Sample(time.monotonic(), float(clock), float(watts), is_at_limit))


def summary(samples: list[Sample], since: float, until: float) -> dict[str, float]:
    """Medians of the samples between, and the share `at_power_limit`; nothing, if there is none."""
    samples = [sample for sample in samples if since <= sample.time <= until]
    if not samples:
        return {}
    return {
        "sm_clock_mhz": statistics.median(sample.sm_clock_mhz for sample in samples),
        "power_watts": statistics.median(sample.watts for sample in samples),
        "at_power_limit": statistics.mean(sample.is_at_limit for sample in samples),
    }
