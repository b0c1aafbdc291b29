"""How many decode steps a dispatch makes."""

from collections.abc import Sequence

from jaxspec.config import StepShapes
from jaxspec.request import Request
from jaxspec.sampler import join
from jaxspec.scheduler.ready_programs import ReadyPrograms, StepNeeds


def num_decode_steps(
    shapes: StepShapes,
    programs: ReadyPrograms,
    running: Sequence[Request],
    budget: int,
    num_free_pages: int,
) -> int:
    """Several where no prompt waits (`budget` is 0) and nobody reads a stream.

    Besides, a row must need them all even if every draft is accepted, there must be pages for them
    without a preemption, and a program that makes them must be compiled.
    """
    several = shapes.num_steps(budget)[-1]
    if several == 1 or any(request.is_streamed for request in running):
        return 1
    bounds = [(request, request.tokens_bound) for request in running]
    left = max((request.max_len - bound for request, bound in bounds), default=0)
    if left < several * shapes.width:
        return 1
    sampler = join(request.sampler for request in running)
    if not programs.can_run(StepNeeds(len(running), 0, sampler, several)):
        return 1
    missing = 0
    for request, bound in bounds:
        reached = min(shapes.reach(bound, several), request.max_len)
        missing += max(0, shapes.pages_for(reached) - len(request.pages))
    return several if missing <= num_free_pages else 1
