"""The queue against a stable sort."""

import numpy as np
import pytest

from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.waiting_queue import WaitingQueue, place


def request(number, priority):
    return Request((1,), SamplingParams(), seed=number, priority=priority)


@pytest.mark.parametrize("seed", range(10))
def test_the_queue_is_sorted_by_priority_and_then_by_arrival(seed):
    random = np.random.default_rng(seed)
    queue, running, oracle, number = WaitingQueue(), [], [], 0
    for _ in range(200):
        kind = random.integers(4)
        if kind < 2:
            new = request(number, int(random.integers(-2, 3)))
            number += 1
            queue.add(new)
            oracle = sorted([*oracle, new], key=lambda r: r.priority)  # stable
        elif kind == 2 and queue:
            first = queue.popleft()
            assert first is oracle.pop(0)
            place(first, running)
            assert running == sorted(running, key=lambda r: r.priority)
            assert [r for r in running if r.priority == first.priority][-1] is first
        elif running:
            last = running.pop()
            queue.put_back(last)
            oracle = sorted([last, *oracle], key=lambda r: r.priority)
        assert list(queue) == oracle


def test_many_equals_are_queued_at_once():
    queue = WaitingQueue()
    equals = [request(0, 0)] * 50_000
    for each in equals:
        queue.add(each)
    assert len(queue) == 50_000
