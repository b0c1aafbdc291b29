"""The drafter follows requests from the scheduler's calls, and forgets them."""

import numpy as np
from fake_device import make_buckets, make_group

from jaxspec.options import SpeculativeConfig
from jaxspec.plan.plan import StepOutput
from jaxspec.plan.step_shapes import SchedulerLimits
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.scheduler.host_drafter import make_host_drafter
from jaxspec.scheduler.scheduler import Scheduler


def make(**options):
    return make_host_drafter(SpeculativeConfig.of({"method": "suffix", **options}))


def make_request(prompt, parent=None):
    return Request(tuple(prompt), SamplingParams(max_tokens=9), 0, parent=parent)


def test_a_request_goes_on_as_one_before_it():
    drafter, first, second = make(), make_request([1, 2, 3]), make_request([1, 2, 3])
    drafter.add(first)
    assert not drafter.path(first, 9).tokens
    drafter.extend(first, [4, 5])
    drafter.extend(first, [6])
    drafter.remove(first)
    drafter.add(second)
    assert drafter.path(second, 9) == ([4, 5, 6], 3)
    assert drafter.path(second, 2) == ([4, 5], 3)
    drafter.extend(second, [4])
    drafter.add(second)  # it was preempted
    assert drafter.path(second, 9) == ([5, 6], 4)
    drafter.clear()
    drafter.add(second)
    assert not drafter.path(second, 9).tokens


def test_samples_of_a_prompt_learn_from_each_other():
    drafter, parent = make(), make_request([1, 2, 3, 1])
    drafter.add(parent)
    drafter.extend(parent, [8, 9])
    sample = make_request([1, 2, 3, 1], parent)
    drafter.add(sample)
    assert drafter.path(sample, 9) == ([8, 9], 4)


def answer(step, rng):
    """One token for each row that is due one; some end."""
    num_rows = getattr(step.plan.program, "decode_rows", 0) + 3
    tokens = rng.integers(0, 9, (1, num_rows, 1))
    tokens = np.pad(tokens, ((0, 0), (0, 0), (0, 2)), constant_values=-1).astype(np.int32)
    nothing = np.zeros((1, num_rows), np.int32)
    finish = np.where(rng.random((1, num_rows)) < 0.4, Finish.STOP, Finish.RUNNING)
    finish = finish.astype(np.int32)
    return StepOutput(tokens, nothing, nothing, finish, nothing, tokens[:, :, 1:])


def test_a_thousand_requests_leave_no_more_than_was_asked_for():
    """Preempted, forked, aborted, ended or failed: the drafter's books are the scheduler's."""
    drafter, rng = make(suffix_decoding_max_cached_requests=5), np.random.default_rng(0)
    shapes = make_buckets(num_drafts=2, path_length=6, num_pages=16)
    scheduler = Scheduler(shapes, SchedulerLimits(), drafter=drafter)
    count = 0
    while count < 1000 or scheduler.has_work:
        if count < 1000 and len(scheduler.waiting) < 4:
            group = make_group(count, int(rng.integers(1, 8)), 12, n=int(rng.integers(1, 4)))
            scheduler.add(group)
            count += len(group)
        if rng.random() < 0.1 and scheduler.has_work:
            scheduler.end([*scheduler.waiting, *scheduler.running][0], Finish.ABORT)
        step = scheduler.schedule()
        if step is not None:
            scheduler.collect(step, answer(step, rng))
        assert set(scheduler.running) <= drafter._texts.keys()
        assert len(drafter._texts) <= shapes.max_num_seqs + scheduler.num_preemptions
        assert len(drafter.index._texts) <= len(drafter._texts) + 5
    assert scheduler.num_preemptions > 0
    assert not drafter._texts and len(drafter.index._texts) <= 5 >= len(drafter.index._ended)
    scheduler.add(make_group(5000, 3, 12))
    scheduler.schedule()
    scheduler.reset()
    assert not drafter._texts and not drafter.index.num_tokens
