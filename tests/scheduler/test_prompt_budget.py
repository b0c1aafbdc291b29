"""What prompts cost: steps compute little more than the prompt tokens that there are."""

import importlib
from collections import deque

import numpy as np
import pytest

from jaxspec.config import StepShapes
from jaxspec.plan import StepOutput
from jaxspec.request import Finish, Request
from jaxspec.sampling_params import SamplingParams
from jaxspec.scheduler.scheduler import Scheduler

workload = importlib.import_module("benchmarks.engine.workload")


def default_shapes(rows, drafts, **given):
    sizes = {"max_model_len": 4096, "page_size": 16}
    names = "num_pages", "decode_rows", "prefill_tokens", "max_num_batched_tokens"
    chosen = dict.fromkeys((*names, "max_prefill_seqs"))
    return StepShapes.of(max_num_seqs=rows, num_drafts=drafts, **sizes | chosen | given)


class Counting:
    """Runs a scheduler's plans two steps late, and counts their prompt tokens.

    Each draft stands with a chance of four fifths.
    """

    def __init__(self, shapes):
        self.scheduler, self.random = Scheduler(shapes), np.random.default_rng(0)
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
            **{
                name: np.zeros((1, rows + len(step.prefills)), int)
                for name in ("num_drafts", "num_accepted", "finish")
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


@pytest.mark.parametrize("drafts", [0, 3])
def test_nine_tenths_of_what_the_trace_computes_of_prompts_is_theirs(drafts):
    """256 requests of unequal lengths at once, 64 rows, default sizes."""
    device, requests = Counting(default_shapes(64, drafts)), workload.lengths("trace")
    device.add(*requests)
    while device.scheduler.has_work:
        device.turn()
    real, computed = np.sum(device.chunks, axis=0)
    assert sum(prompt for prompt, _ in requests) - 256 <= real <= 154_950
    assert real >= 0.9 * computed


def test_a_prompt_that_nobody_decodes_beside_is_whole():
    device = Counting(default_shapes(8, 3))
    device.add((100, 5))
    device.turn()
    assert device.chunks == [(100, 512)]


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        (40, [(40, 64)]),
        (100, [(64, 64), (36, 64)]),
        (300, [(300, 512)]),
        (700, [(512, 512), (64, 64), (64, 64), (60, 64)]),
    ],
)
def test_beside_rows_that_decode_what_would_be_padding_waits_for_the_next_step(prompt, chunks):
    device = Counting(default_shapes(8, 3))
    device.add((8, 200))
    for _ in range(4):
        device.turn()
    device.chunks.clear()
    (request,) = device.add((prompt, 5))
    while not request.num_output:
        device.turn()
    assert device.chunks == chunks


def test_rows_that_decode_take_no_room_from_prompts():
    """All but one of 64 rows decode, and a prompt of 512 tokens is one step's."""
    device = Counting(default_shapes(64, 3))
    device.add(*[(8, 300)] * 63)
    for _ in range(30):
        device.turn()
    assert sum(not request.is_prefilling for request in device.scheduler.running) == 63
    device.chunks.clear()
    device.add((512, 5))
    device.turn()
    assert device.chunks == [(512, 512)]
