"""Times of the programs between steps: caching a state, and restoring one.

Each program is enqueued many times. The time of many calls less that of a few, over the calls
between, is the device's time, or the host's if that is longer; a profile adds the time of kernels
and copies on the device. Each call has another row, cached state and page than the one before, so
that the L2 cache holds little of them.
"""

import statistics
from collections.abc import Callable, Sequence

import jax
import numpy as np

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import Figures
from benchmarks.measure.kernel_times import kernel_times
from jaxspec import LLM
from jaxspec.cache import MEMORY_LABELS
from jaxspec.plan.plan import (
    EXPORT,
    RESTORE,
    Program,
    StateExport,
    StepPlan,
    pack_export,
    plan_layout,
)
from jaxspec.requests.outputs import Sample

PROFILED = 64  # calls
MAX_PLANS = 16  # different ones

NAMES = {EXPORT: "export", RESTORE: "restore"}


def measure(llm: LLM, shape: str, copy: float) -> dict[str, Figures]:
    """The figures of each program that the engine has, where a copy moves `copy` bytes a second.

    The device's state means nothing afterwards: close the engine.
    """
    samples = _decoding(llm, shape)
    found = {}
    for program in (each for each in NAMES if llm._runner.is_warm(each)):
        plans = [_plan(llm, program, samples, index) for index in range(_num_plans(llm))]
        found[NAMES[program]] = _timed(llm, plans, _bytes_moved(llm, program), copy)
    return found


def _decoding(llm: LLM, shape: str) -> list[Sample]:
    """Start a row in every slot, with no step in flight."""
    rows = llm.shapes.max_num_seqs
    prompts = dummy_llm.random_prompts(shape, rows, 2 * llm.shapes.page_size)
    groups = llm.prepare(prompts, [dummy_llm.greedy(3 * llm.shapes.page_size)] * rows)
    samples = [sample for (sample,) in groups]
    llm.session.add(samples)
    while not all(sample.request.num_output for sample in samples):
        llm.session.step()
    llm.session.engine.drain()
    return samples


def _num_plans(llm: LLM) -> int:
    return min(MAX_PLANS, llm.shapes.num_checkpoints or MAX_PLANS)


def _plan(llm: LLM, program: Program, samples: Sequence[Sample], index: int) -> StepPlan:
    """Plan the copy of a page, and of a state if the engine caches states."""
    request = samples[index % len(samples)].request
    checkpoint = 1 + index if llm.shapes.num_checkpoints else 0
    last = llm.shapes.num_pages - 1
    pages = 1 + index % last, last - index % last
    if program == EXPORT:
        return pack_export(StateExport(request.row, checkpoint, *pages))
    packed = llm._runner._empty_plan(program)
    fields = plan_layout(program, llm.shapes).unpack(packed)
    names = "source_slots", "target_slots", "source_pages", "target_pages"
    for name, value in zip(names, (checkpoint, request.slot, *pages), strict=True):
        fields[name][0] = value
    return StepPlan(program, packed)


def _bytes_moved(llm: LLM, program: Program) -> float:
    """Return the bytes of a state and a page, read and written, and of an export's ring."""
    held, shapes = llm.metrics()["memory_bytes"], llm.shapes
    page = sum(held.get(name, 0) for name, each in MEMORY_LABELS.items() if each.per[0] == "pages")
    state = held.get("checkpoints", 0) / (1 + shapes.num_checkpoints)
    ring = held.get("ring", 0) / shapes.num_slots if program == EXPORT else 0
    return 2 * (state + page / shapes.num_pages) + ring


def _timed(llm: LLM, plans: Sequence[StepPlan], moved: float, copy: float) -> Figures:
    from benchmarks.kernels.run import each  # with all kernels and their cases

    run = _repeated(llm, plans)
    times = [1e6 * seconds for seconds in each(run)]
    profile = kernel_times(lambda: run(PROFILED), PROFILED)
    figures = dummy_llm.spread("us", times) | {"bytes_moved": round(moved)}
    if profile["kernels_per_step"]:
        figures["device_us"] = 1000 * profile["kernels_ms"]
        figures["kernels"] = profile["kernels_per_step"]
    least = figures.get("device_us", statistics.median(times))
    return {**figures, "of_copy": moved / copy / (1e-6 * least)}


def _repeated(llm: LLM, plans: Sequence[StepPlan]) -> Callable[[int], float]:
    """Return a function of a count, which dispatches that many plans and returns their seconds."""
    runner = llm._runner
    # On the device beforehand: a transfer would make a deep queue wait for the host's staging.
    packed = [StepPlan(each.program, jax.device_put(np.array(each.packed))) for each in plans]
    jax.block_until_ready([each.packed for each in packed])

    def run(count: int) -> float:
        _, seconds = dummy_llm.timed(lambda: _all(count))
        return seconds

    def _all(count: int) -> None:
        for index in range(count):
            last = runner.dispatch(packed[index % len(packed)])
        last.result()

    return run
