"""Prompt tokens of the next step, and the number of its decode steps."""

import itertools
from collections.abc import Callable, Sequence

from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_features import join
from jaxspec.scheduler.forks import ForkedSamples
from jaxspec.scheduler.ready_programs import ReadyPrograms, StepNeeds


def prompt_budget(
    shapes: StepShapes,
    limits: SchedulerLimits,
    running: Sequence[Request],
    waiting: Sequence[Request],
    forked: ForkedSamples,
    num_free: int,
    within_bound: Callable[[int, int], int],
) -> int:
    """Return the prompt tokens of the next step, within the room beside rows that decode.

    While rows decode, more steps follow anyway. Then tokens that would fill little of a larger size
    wait for the next step, as do those that `within_bound` (`StepSeconds`) excludes. The result is
    at least 1 while a prompt waits, even if none of the `num_free` rows is left for it; 0 without
    prompts.
    """
    if not waiting and not any(request.is_prefilling for request in running):
        return 0
    num_decodes = sum(r.takes_decode_row and not r.awaits_result for r in running)
    left = limits.max_num_batched_tokens - num_decodes * shapes.width
    left = min(shapes.prefill_tokens[-1], left)
    if num_decodes == 0:
        return left
    due = sum(_due_chunks(shapes, limits, running, waiting, forked, num_free))
    return max(1, within_bound(shapes.well_filled(min(left, due)), num_decodes))


def _due_chunks(
    shapes: StepShapes,
    limits: SchedulerLimits,
    running: Sequence[Request],
    waiting: Sequence[Request],
    forked: ForkedSamples,
    num_free: int,
) -> list[int]:
    """Return the prompt tokens of each request that a step could compute with enough pages."""
    started = [r for r in running if r.is_prefilling and not r.takes_decode_row]
    lengths = [forked.prefill_end(request) - request.num_computed for request in started]
    new = (request for request in waiting if not forked.waits(request, running))
    lengths += [len(request.tokens) for request in itertools.islice(new, num_free)]
    longest = limits.long_prefill_token_threshold or max(lengths, default=0)
    return [min(length, longest) for length in lengths if length > 0][: shapes.max_prefill_seqs]


def num_decode_steps(
    shapes: StepShapes,
    programs: ReadyPrograms,
    running: Sequence[Request],
    budget: int,
    num_free_pages: int,
) -> int:
    """Return the decode steps of the next dispatch: 1, or `steps_per_dispatch`.

    More than 1 requires that no prompt waits (`budget` is 0), no request is streamed or masked by
    the host, some row needs all steps even if every draft is accepted, the free pages suffice
    without a preemption, and a program for that number of steps is compiled.
    """
    several = shapes.num_steps(budget)[-1]
    if several == 1 or any(r.is_streamed or r.is_masked_by_host for r in running):
        return 1
    bounds = [(request, request.tokens_bound) for request in running]
    left = max((request.max_len - bound for request, bound in bounds), default=0)
    if left < several * shapes.width:
        return 1
    features = join(request.features for request in running)
    if not programs.can_run(StepNeeds(len(running), 0, features, several)):
        return 1
    missing = 0
    for request, bound in bounds:
        reached = min(shapes.reach(bound, several), request.max_len)
        missing += max(0, shapes.pages_for(reached) - len(request.pages))
    return several if missing <= num_free_pages else 1
