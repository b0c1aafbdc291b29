"""Drafts of paths: the alignment token by token in Python, what comes again, and the laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GREEDY, REPLAY, SAMPLED, Harness, prompts
from pairwise import soak

from jaxspec.options.draft_methods import SuffixOptions
from jaxspec.plan.plan import Program, plan_layout
from jaxspec.proposers import suffix
from jaxspec.proposers.base import HostPaths
from jaxspec.proposers.suffix import align
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runner import draft_inputs
from jaxspec.runner.step import make_step

REPEATING = [(5, 6, 7, 8) * 4, (1, 2, 3) * 5, (9,) * 11, (4, 3, 2, 1, 4, 3, 9, 9, 4, 3)]
LONGER = SamplingParams(temperature=0.0, max_tokens=40)


def expected_drafts(tokens, path, first, count):
    """What the path says behind `tokens`, if those from `first` on are its first ones."""
    since = tokens[first:]
    if first > len(tokens) or path[: len(since)] != since:
        return None
    return path[len(since) :][:count]


def test_drafts_follow_what_came_since():
    rng, length, count, seen = np.random.default_rng(0), 6, 3, set()
    for _ in range(60):
        tokens = rng.integers(0, 2, (8, 20))
        newest, first = rng.integers(4, 12, 8), rng.integers(4, 12, 8)
        sizes = rng.integers(0, length + 1, 8)
        paths = np.where(np.arange(length) < sizes[:, None], rng.integers(0, 2, (8, length)), -1)
        for row in range(0, 8, 2):  # the other half are right about what came
            came = tokens[row, first[row] : newest[row] + 1][: sizes[row]]
            paths[row, : len(came)] = came
        came = np.take_along_axis(tokens, first[:, None] + np.arange(length), axis=1)
        host = HostPaths(jnp.asarray(paths), jnp.asarray(first), jnp.zeros(8, jnp.int32))
        drafts, follows = align(host, jnp.asarray(newest), jnp.asarray(came), count)
        for row in range(8):
            known = tokens[row, : newest[row] + 1].tolist()
            path = paths[row, : sizes[row]].tolist()
            want = expected_drafts(known, path, first[row], count)
            got = [token for token in drafts[row].tolist() if token >= 0]
            assert (got if follows[row] else []) == (want or []), row
            seen.add(len(want or []))
    assert seen == {0, 1, 2, 3}


def make(drafts=4, options=None, **settings):
    return Harness(drafts=drafts, method="suffix", options=options or SuffixOptions(), **settings)


def twice(engine, params=LONGER):
    """(drafts, accepted) of prompts that come again."""
    for prompt in prompts(4):
        engine.add(prompt, params)
    engine.run()
    first = len(engine.requests)
    for prompt in prompts(4):
        engine.add(prompt, params)
    assert engine.run().check() <= 1
    again = [request.metrics for request in engine.requests[first:]]
    return sum(m.num_draft_tokens for m in again), sum(m.num_accepted_tokens for m in again)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [{"max_in_flight": 0}, {"max_in_flight": 2}, {"max_in_flight": 3, "steps_per_dispatch": 2}],
    ids=str,
)
def test_a_text_that_comes_again_is_drafted_right_however_late_the_host_is(settings):
    drafts, accepted = twice(make(**settings))
    assert drafts > 100 and accepted >= 0.9 * drafts


@pytest.mark.soak
@pytest.mark.parametrize("depth", [2, soak(0)])
def test_a_path_that_is_aligned_one_place_late_is_seen(depth, monkeypatch):
    """The test above would fail."""

    def late(paths, newest, came, num_drafts):
        drafts, follows = align(paths, newest, came, num_drafts + 1)
        return drafts[:, 1:], follows

    monkeypatch.setattr(suffix, "align", late)
    # Programs are shared by engines of equal shapes: no other has these.
    drafts, accepted = twice(make(max_in_flight=depth, page_size=6))
    assert drafts > 50 and accepted < 0.2 * drafts


@pytest.mark.soak
def test_the_match_and_the_factor_bound_the_drafts():
    assert twice(make(options=SuffixOptions(suffix_decoding_max_spec_factor=0))) == (0, 0)
    few = SuffixOptions(suffix_decoding_max_tree_depth=1, suffix_decoding_max_spec_factor=0.5)
    engine = make(options=few, max_in_flight=0)
    assert twice(engine)[0] > 0
    assert all(not any(r.metrics.drafted_per_position[2:]) for r in engine.requests)


@pytest.mark.soak
def test_only_what_runs_is_known_where_no_ended_request_is_kept():
    options = SuffixOptions(suffix_decoding_max_cached_requests=0)
    assert twice(make(options=options))[0] < 20


SYNCHRONOUS = {"max_in_flight": 0, "chunk": 1}
REPLAYED = {"max_in_flight": 3, "chunk": 7, "states": REPLAY}
PREEMPTED = {"num_pages": 16}
SEVERAL = {"steps_per_dispatch": 2, "draft_buckets": (0, 1, 4)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options, params",
    [
        (SYNCHRONOUS, GREEDY),
        (REPLAYED, SAMPLED),
        (PREEMPTED, SAMPLED),
        (SEVERAL, GREEDY),
        soak(SYNCHRONOUS, SAMPLED),
        soak({"max_in_flight": 1}, GREEDY),
        soak({"max_in_flight": 1}, SAMPLED),
        soak(REPLAYED, GREEDY),
        soak(PREEMPTED, GREEDY),
        soak(SEVERAL, SAMPLED),
    ],
)
def test_paths_change_no_output(options, params, monkeypatch):
    """Laws 1, 3 and 4."""
    engine = make(feature_sets=(params.features,), **options)
    if "draft_buckets" in options:
        rng = np.random.default_rng(0)
        chooser = engine.scheduler.adaptive_drafts
        monkeypatch.setattr(chooser, "choose", lambda *_: int(rng.choice([0, 1, 4])))
    for seed, prompt in [*enumerate([*REPEATING, *prompts(4)])] * 2:  # the same seeds come again
        engine.add(prompt, params, seed)
        engine.step()
    engine.scheduler.end(engine.add((7, 7, 7), params)[0], Finish.ABORT)
    assert engine.run().check() <= 1
    assert sum(request.metrics.num_draft_tokens for request in engine.requests) > 0
    if "num_pages" in options:
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.soak
def test_samples_of_one_prompt_draft_for_each_other():
    params = SamplingParams(temperature=0.8, max_tokens=12, n=3)
    engine = make(feature_sets=(params.features,))
    for prompt in REPEATING:
        for sample in engine.add(prompt, params, seed=3):
            sample.params = SAMPLED
    assert engine.run().check() <= 1


@pytest.mark.soak
def test_programs_of_other_methods_are_what_they_were(monkeypatch):
    """Their plans have no paths, and no text of a program shows that others have."""
    engine = Harness(drafts=2)
    program = Program(4, 0, GREEDY.features, 1, 2)
    shapes = engine.runner.shapes
    assert shapes.path_length == 0
    assert not any("path" in name for name in plan_layout(program, shapes).fields)

    def text():
        step = jax.jit(make_step(engine.runner._config, program), donate_argnums=2)
        return step.lower(*engine.runner._args(program)).as_text()

    with_paths = text()
    assert f"tensor<{plan_layout(program, shapes).size}xi32>" in with_paths
    monkeypatch.setattr(draft_inputs, "_paths", lambda *_: None)
    assert text() == with_paths
