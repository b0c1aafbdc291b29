"""A device that runs plans in no time and counts what they compute; its tokens mean nothing."""

from collections import deque

import numpy as np

from jaxspec.options.engine_options import EngineConfig
from jaxspec.plan.plan import StepOutput
from jaxspec.plan.step_shapes import ModelSizes
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.scheduler.scheduler import Scheduler


def sizes_for(rows, drafts, tokens_per_step=512, **given):
    config = EngineConfig(**{"max_num_seqs": rows, "max_model_len": 4096} | given)
    return config.sizes(ModelSizes(10**6, tokens_per_step), (drafts,))


class Counting:
    """Runs a scheduler's plans two steps late, and counts their prompt tokens.

    Each draft stands with a chance of four fifths.
    """

    def __init__(self, shapes, limits):
        self.scheduler, self.random = Scheduler(shapes, limits), np.random.default_rng(0)
        self.lengths = {}  # of each request, as the device knows them
        self.chunks = []  # prompt tokens, and how many the program has room for, by step
        self.in_flight = deque()

    def add(self, *lengths):
        params = [SamplingParams(max_tokens=new, ignore_eos=True) for _, new in lengths]
        requests = [Request((1,) * n, p, 0) for (n, _), p in zip(lengths, params, strict=True)]
        self.lengths.update((request, len(request.prompt)) for request in requests)
        self.scheduler.add(requests)
        return requests

    def turn(self):
        step = self.scheduler.schedule()
        if step is not None:
            self.in_flight.append((step, self.run(step)))
            if step.num_prompt_tokens:
                self.chunks.append((step.num_prompt_tokens, step.plan.program.prefill_tokens))
        if step is None or len(self.in_flight) > 2:
            self.scheduler.collect(*self.in_flight.popleft())

    def run(self, step):
        rows, drafts = step.plan.program.decode_rows, self.scheduler.shapes.num_drafts
        output = StepOutput(
            tokens=np.full((1, rows + len(step.prefills), 1 + drafts), -1),
            next_drafts=np.full((1, rows + len(step.prefills), drafts), -1),
            **{
                name: np.zeros((1, rows + len(step.prefills)), int)
                for name in ("num_drafts", "num_accepted", "finish", "num_dropped")
            },
        )
        for row, entry in step.rows:
            request = entry.request
            left = request.max_len - self.lengths[request]
            most = 1 + np.argmin([*(self.random.random(drafts) < 0.8), False])
            given = min(left, most if row < rows else entry.bound)
            output.tokens[0, row, :given] = 1
            self.lengths[request] += given
            output.finish[0, row] = Finish.LENGTH if given == left else Finish.RUNNING
        return output
