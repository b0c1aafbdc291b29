"""How many decode steps a dispatch makes; test_scheduler.py has what comes of it."""

import pytest
from fake_device import make_buckets

from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.scheduler.prompt_budget import num_decode_steps
from jaxspec.scheduler.ready_programs import ReadyPrograms

SHAPES = make_buckets(steps_per_dispatch=4, num_drafts=1)


def decoding(max_tokens, num_pages=3, **fields):
    """A request that has computed its prompt of 5 tokens and has no output yet."""
    request = Request((1,) * 5, SamplingParams(max_tokens=max_tokens), seed=0)
    request.prefill_len = request.num_computed = 5
    request.pages = list(range(1, 1 + num_pages))
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("running", "budget", "num_free_pages", "steps"),
    [
        ([decoding(30)], 0, 9, 4),
        ([decoding(30)], 1, 9, 1),  # a prompt waits
        ([decoding(30, is_streamed=True), decoding(30)], 0, 9, 1),
        ([decoding(8)], 0, 9, 4),  # four verifies of two tokens
        ([decoding(7)], 0, 9, 1),
        ([decoding(30, in_flight_bound=23)], 0, 9, 1),  # 7 are left if all drafts stand
        ([decoding(7), decoding(8)], 0, 9, 4),  # it is over when the last one is
        ([decoding(30, num_pages=4)], 0, 0, 4),  # 13 positions, which 3 pages do not hold
        ([decoding(30)], 0, 0, 1),
        ([decoding(30, in_flight_bound=1)], 0, 0, 1),
        ([decoding(30, in_flight_bound=1)], 0, 1, 4),
        # The second lacks a page, and pages that the first has to spare are not its.
        ([decoding(30, num_pages=5), decoding(30, num_pages=3)], 0, 0, 1),
        ([decoding(30, num_pages=5), decoding(30, num_pages=3)], 0, 1, 4),
        ([], 0, 9, 1),
    ],
)
def test_several_steps_where_nobody_waits_and_a_row_needs_them_all(
    running, budget, num_free_pages, steps
):
    assert num_decode_steps(SHAPES, ReadyPrograms(SHAPES), running, budget, num_free_pages) == steps


def test_one_step_is_all_that_was_asked_for():
    one = make_buckets()
    assert num_decode_steps(one, ReadyPrograms(one), [decoding(30)], 0, 9) == 1
