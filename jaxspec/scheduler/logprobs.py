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
        _record_output(step, output)
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


def _record_output(step: ScheduledStep, output: StepOutput) -> None:
    """Copy the fields of all emitted tokens at once: the array belongs to the device's runtime."""
    assert output.logprobs is not None
    asked = [
        (row, entry.request)
        for row, entry in step.rows
        if entry.request.params.logprobs is not None and entry.is_awaited
    ]
    if not asked:
        return
    rows = np.array([row for row, _ in asked])
    is_emitted = output.tokens[:, rows].swapaxes(0, 1) >= 0
    index, steps, places = np.nonzero(is_emitted)
    fields = list(output.logprobs[steps, rows[index], places])
    ends = np.cumsum(is_emitted.sum(axis=(1, 2))).tolist()
    for (_, request), start, end in zip(asked, [0, *ends], ends, strict=False):
        request.logprobs += fields[start:end]
