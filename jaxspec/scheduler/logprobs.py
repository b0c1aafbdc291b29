"""Logprobs that a step reports, given to the requests that asked for them."""

import numpy as np

from jaxspec.plan import StepOutput
from jaxspec.scheduler.scheduled_step import ScheduledStep


def record_logprobs(step: ScheduledStep, output: StepOutput) -> None:
    """Keep what `output` reports of each request's tokens, before the tokens themselves are.

    A neighbour may be the reason why a program reports, so only who asked is given any. Those of
    a prompt lie at their index in it: a request that reads its prompt again after a preemption
    writes the same places.
    """
    if output.logprobs is not None:
        for row, entry in step.rows:
            request = entry.request
            if request.params.logprobs is not None and entry.is_awaited:
                steps, places = np.nonzero(output.tokens[:, row] >= 0)
                request.logprobs.extend(output.logprobs[steps, row, places])
    if output.prompt_logprobs is not None:
        (reported,), start = output.prompt_logprobs, 0
        for entry in step.prefills:
            request, chunk = entry.request, entry.chunk
            rows = reported[start : start + len(chunk)]
            start += len(chunk)
            if request.params.prompt_logprobs is not None and entry.is_current:
                end = min(chunk.stop + 1, len(request.prompt))  # the output is not the prompt's
                count = max(end - chunk.start - 1, 0)
                # A copy: the array belongs to the device's runtime.
                request.prompt_logprobs[chunk.start + 1 : end] = rows[:count].copy()
