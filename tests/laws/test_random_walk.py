"""Laws 1, 3, 4, 5 and 7 together, over walks of many hundred steps."""

import dataclasses

import numpy as np
import pytest
from harness import REPLAY, SNAPSHOT
from walk import PARAMS, random_walk, walk_harness

from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.scheduler.step_seconds import StepSeconds

SMALL = {"decode_rows": (1, 4), "prefill_tokens": (8, 64)}
BOTH = {"feature_sets": tuple({each.features: None for each in PARAMS})}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "depth, chunk, num_pages, options",
    [
        (3, 7, 24, {"steps_per_dispatch": 2}),
        (2, None, 40, {"decode_rows": (1, 4), **BOTH}),
        (0, 3, 40, SMALL),
        (1, 5, 24, {"states": REPLAY}),
    ],
    ids=["deep, in twos and short of pages", "several programs", "synchronous", "replay"],
)
def test_whatever_happens_to_a_batch_every_request_gives_its_own_tokens(
    depth, chunk, num_pages, options
):
    """Admit, accept, reject, zero drafts, placeholders, finish, preempt, abort, fork, permute."""
    engine = walk_harness(
        (0.8, 0.6, 0.5),
        vary=True,
        max_in_flight=depth,
        chunk=chunk,
        num_pages=num_pages,
        **options,
    )
    happened = random_walk(engine, 600, seed=depth)
    ties = engine.check()
    print(f"{len(engine.requests)} requests, {engine.engine.metrics.num_steps} steps, {ties} ties")
    assert ties <= 3
    assert min(happened.values()) > 3
    assert engine.engine.metrics.num_steps > 420
    assert engine.scheduler.num_preemptions > happened["preempt"] * 0.5
    drafted = sum(request.metrics.num_draft_tokens for request in engine.requests)
    accepted = sum(request.metrics.num_accepted_tokens for request in engine.requests)
    assert 0.1 * drafted < accepted < 0.8 * drafted
    assert engine.scheduler.pages.num_free == num_pages - 1
    assert sorted(engine.scheduler._free_slots) == list(range(1, engine.buckets.num_slots))


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("states", [SNAPSHOT, REPLAY], ids=["snapshot", "replay"])
def test_numbers_of_drafts_that_change_at_random_change_no_token(states, monkeypatch):
    """Laws 1, 3, 4, 5 and 7 with steps of 1, 2 and 4 tokens in any order, and capped requests."""
    options = {"steps_per_dispatch": 2, "num_pages": 40, "states": states}
    engine = walk_harness((0.8, 0.6, 0.5), vary=True, draft_buckets=(0, 1, 3), **options)
    rng, seen = np.random.default_rng(1), set()

    def choose(needs, most):
        seen.add(count := int(rng.choice([0, 1, 3])))
        return count

    monkeypatch.setattr(engine.scheduler.adaptive_drafts, "choose", choose)
    capped = [
        dataclasses.replace(p, num_speculative_tokens=k) for p in PARAMS for k in (None, 0, 2)
    ]
    happened = random_walk(engine, 400, seed=11, params=capped)
    assert engine.check() <= 3
    assert seen == {0, 1, 3} and min(happened.values()) > 3
    for request in engine.requests:
        accepted = request.metrics.accepted_per_position
        assert not any(accepted[request.max_drafts :])
    assert sum(request.metrics.num_accepted_tokens for request in engine.requests) > 40


@pytest.mark.soak
def test_sizes_that_change_in_the_middle_change_no_token_and_need_no_other_program(monkeypatch):
    """Prompts a step, by what steps are said to take, and steps a dispatch, by who streams.

    A program that was not warmed up could not be dispatched.
    """
    options = {"steps_per_dispatch": 2, "num_pages": 40, **SMALL}
    engine = walk_harness((0.8, 0.6, 0.5), vary=True, **options)
    scheduler, rng, seen = engine.scheduler, np.random.default_rng(0), set()
    scheduler.step_seconds = seconds = StepSeconds(engine.buckets, max_step_ms=30)
    schedule = scheduler.schedule

    def schedule_anew():
        seconds.note(Program(4, 64, GREEDY, num_drafts=3), rng.choice([0.001, 0.05]))
        for request in scheduler.running:
            request.is_streamed = rng.random() < 0.05
        step = schedule()
        if step is not None and step.decodes:
            seen.add((step.plan.program.prefill_tokens, step.plan.program.num_steps))
        return step

    monkeypatch.setattr(scheduler, "schedule", schedule_anew)
    happened = random_walk(engine, 300, seed=7)
    assert engine.check() <= 2
    assert seen == {(0, 1), (0, 2), (8, 1), (64, 1)}
    assert min(happened.values()) > 3
