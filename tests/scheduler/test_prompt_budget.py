"""What prompts cost: steps compute little more than the prompt tokens that there are."""

import importlib

import numpy as np
import pytest
from counting_device import Counting, sizes_for

workload = importlib.import_module("benchmarks.engine.workload")


@pytest.mark.parametrize("drafts", [0, 3])
def test_nine_tenths_of_what_the_trace_computes_of_prompts_is_theirs(drafts):
    """256 requests of unequal lengths at once, 64 rows, default sizes."""
    device, requests = Counting(*sizes_for(64, drafts)), workload.lengths("trace")
    device.add(*requests)
    while device.scheduler.has_work:
        device.turn()
    real, computed = np.sum(device.chunks, axis=0)
    assert sum(prompt for prompt, _ in requests) - 256 <= real <= 154_950
    assert real >= 0.9 * computed


def test_a_prompt_that_nobody_decodes_beside_is_whole():
    device = Counting(*sizes_for(8, 3))
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
    device = Counting(*sizes_for(8, 3))
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
    device = Counting(*sizes_for(64, 3))
    device.add(*[(8, 300)] * 63)
    for _ in range(30):
        device.turn()
    assert sum(not request.is_prefilling for request in device.scheduler.running) == 63
    device.chunks.clear()
    device.add((512, 5))
    device.turn()
    assert device.chunks == [(512, 512)]
