"""How many prompt tokens a step computes."""

import itertools
from collections.abc import Callable, Sequence

from jaxspec.config import StepShapes
from jaxspec.request import Request
from jaxspec.scheduler.forks import Followers


def prompt_budget(
    shapes: StepShapes,
    running: Sequence[Request],
    waiting: Sequence[Request],
    followers: Followers,
    num_free: int,
    within_bound: Callable[[int, int], int],
) -> int:
    """Prompt tokens of the next step: no more than there is room for beside rows that decode.

    While rows decode, more steps come anyway. Then tokens that would fill little of a larger size
    wait for the next step, and so do those that `within_bound` (`StepSeconds`) cuts off. At least 1
    while a prompt waits, even if none of the `num_free` rows is left for it; 0 if there is no
    prompt.
    """
    if not waiting and not any(request.is_prefilling for request in running):
        return 0
    num_decodes = sum(request.takes_decode_row for request in running)
    left = shapes.max_num_batched_tokens - num_decodes * shapes.width
    left = min(shapes.prefill_tokens[-1], left)
    if num_decodes == 0:
        return left
    due = sum(_due_chunks(shapes, running, waiting, followers, num_free))
    return max(1, within_bound(shapes.well_filled(min(left, due)), num_decodes))


def _due_chunks(
    shapes: StepShapes,
    running: Sequence[Request],
    waiting: Sequence[Request],
    followers: Followers,
    num_free: int,
) -> list[int]:
    """The prompt tokens of each request that a step could compute, if there are pages for them."""
    started = [r for r in running if r.is_prefilling and not r.takes_decode_row]
    lengths = [followers.prefill_end(request) - request.num_computed for request in started]
    new = (request for request in waiting if not followers.waits(request, running))
    lengths += [len(request.tokens) for request in itertools.islice(new, num_free)]
    longest = shapes.long_prefill_token_threshold or max(lengths, default=0)
    return [min(length, longest) for length in lengths if length > 0][: shapes.max_prefill_seqs]
