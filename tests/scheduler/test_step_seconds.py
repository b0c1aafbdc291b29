"""How long a step with prompts may take: the largest size that keeps to the bound."""

import pytest
from counting_device import Counting, sizes_for

from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.scheduler.step_seconds import StepSeconds

SIZES = {"decode_buckets": (1, 16), "prefill_buckets": (64, 512, 2048), "max_model_len": 9000}
SHAPES, LIMITS = sizes_for(16, 0, tokens_per_step=2048, **SIZES)


def make_seconds(bound):
    return StepSeconds(SHAPES, bound)


def note(seconds, tokens, milliseconds, rows=16, times=1):
    for _ in range(times):
        seconds.note(Program(rows, tokens, GREEDY), milliseconds / 1000)


def test_without_a_bound_steps_are_as_large_as_programs():
    seconds = make_seconds(None)
    note(seconds, 2048, 10**6)
    assert seconds.within_bound(2048, 8) == 2048


def test_a_size_that_is_not_known_is_tried_and_then_kept_to_the_bound():
    seconds = make_seconds(30.0)
    assert seconds.within_bound(2048, 8) == 2048
    note(seconds, 2048, 60)
    assert seconds.within_bound(2048, 8) == 512
    note(seconds, 512, 21)
    assert seconds.within_bound(2048, 8) == 512
    note(seconds, 512, 60, times=3)
    assert seconds.within_bound(2048, 8) == 64
    note(seconds, 64, 60)
    assert seconds.within_bound(2048, 8) == 64  # prompts go on, whatever the bound


def test_a_size_above_one_that_takes_too_long_is_not_tried():
    seconds = make_seconds(30.0)
    note(seconds, 512, 40)
    assert seconds.within_bound(2048, 8) == 64


def test_few_rows_have_times_of_their_own():
    seconds = make_seconds(30.0)
    note(seconds, 2048, 60)
    note(seconds, 2048, 25, rows=1)
    assert [seconds.within_bound(2048, rows) for rows in (1, 2)] == [2048, 512]


def test_steps_without_prompts_tell_nothing():
    seconds = make_seconds(30.0)
    note(seconds, 0, 60)
    assert seconds.within_bound(2048, 8) == 2048


def passed_over(seconds):
    """Steps of 512 tokens until one of 2,048 comes."""
    passed = 0
    while seconds.within_bound(2048, 8) == 512:
        passed += 1
    return passed


@pytest.mark.parametrize(("milliseconds", "steps"), [(31, 33), (60, 693), (10**6, 693)])
def test_what_took_too_long_is_tried_again_one_step_at_a_time(milliseconds, steps):
    """While that one is in flight, and where nobody sees what it took, no other one comes."""
    seconds = make_seconds(30.0)
    note(seconds, 2048, milliseconds)
    assert abs(passed_over(seconds) - steps) <= 1
    assert passed_over(seconds) >= 692
    note(seconds, 2048, milliseconds)
    assert abs(passed_over(seconds) - steps) <= 1


def test_a_size_that_nobody_needs_is_not_passed_over():
    """A trial would else be spent on a step that is smaller anyway."""
    seconds = make_seconds(30.0)
    note(seconds, 2048, 31)
    assert [seconds.within_bound(300, 8) for _ in range(99)] == [300] * 99
    assert abs(passed_over(seconds) - 33) <= 1


def test_a_size_that_is_fast_after_all_is_used_at_once():
    seconds = make_seconds(30.0)
    note(seconds, 2048, 10**4)
    assert passed_over(seconds)
    note(seconds, 2048, 25)
    assert [seconds.within_bound(2048, 8) for _ in range(3)] == [2048] * 3


def test_one_step_that_hung_costs_few_hundred_steps():
    seconds = make_seconds(30.0)
    note(seconds, 2048, 21, times=9)
    note(seconds, 2048, 10**6)
    assert passed_over(seconds) < 350


def test_what_is_guessed_gives_way_to_what_was_seen():
    seconds, program = make_seconds(30.0), Program(16, 2048, GREEDY)
    seconds.guess(program, 0.06)
    assert seconds.within_bound(2048, 8) == 512
    note(seconds, 2048, 20)
    seconds.guess(program, 0.06)
    assert seconds.within_bound(2048, 8) == 2048


@pytest.mark.parametrize(("bound", "chunks"), [(None, {2048}), (30.0, {512})])
def test_a_long_prompt_beside_rows_that_decode_comes_in_chunks_that_keep_to_the_bound(
    bound, chunks
):
    device = Counting(SHAPES, LIMITS)
    device.scheduler.step_seconds = seconds = make_seconds(bound)
    for tokens, milliseconds in ((64, 12), (512, 21), (2048, 60)):
        note(seconds, tokens, milliseconds, rows=1)
    device.add((8, 300))
    for _ in range(5):
        device.turn()
    device.chunks.clear()
    device.add((8192, 1))
    for _ in range(4):
        device.turn()
    assert {tokens for tokens, _ in device.chunks} == chunks


def test_where_no_row_decodes_nothing_bounds_a_prompt():
    device = Counting(SHAPES, LIMITS)
    device.scheduler.step_seconds = seconds = make_seconds(30.0)
    note(seconds, 2048, 60, rows=1)
    device.add((8192, 1))
    device.turn()
    assert device.chunks == [(2048, 2048)]
