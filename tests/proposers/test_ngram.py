"""Drafts by looking up: the specification, token by token in Python, and the laws."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from harness import GREEDY, REPLAY, SAMPLED, Harness, prompts
from pairwise import soak

from jaxspec.options.draft_methods import NgramOptions
from jaxspec.proposers.ngram import look_up

REPEATING = [(5, 6, 7, 8) * 4, (1, 2, 3) * 5, (9,) * 11, (4, 3, 2, 1, 4, 3, 9, 9, 4, 3)]

OF_FEW = dataclasses.replace(SAMPLED, allowed_token_ids=tuple(range(1, 10)))  # texts repeat


def expected_drafts(tokens, shortest, longest, count):
    """What followed the longest match of the newest tokens, the last one of equally long ones."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                following = tokens[start + length :]
                return [following[i % len(following)] for i in range(count)]
    return None


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def jitted(tokens, lengths, shortest, longest, count):
    return look_up(tokens, lengths, shortest, longest, count)


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3), (3, 3)])
@pytest.mark.parametrize("ids", [2, 4, 6])
def test_the_longest_match_then_the_last(shortest, longest, ids):
    rng, size, count = np.random.default_rng(ids), 24, 5
    lengths = np.array([*range(1, size + 1)] * 4, np.int32)
    tokens = rng.integers(0, ids, (len(lengths), size)).astype(np.int32)  # junk behind, too
    drafts, found = map(np.asarray, jitted(tokens, lengths, shortest, longest, count))
    some = 0
    for row, length in enumerate(lengths):
        want = expected_drafts(tokens[row, :length].tolist(), shortest, longest, count)
        assert found[row] == (want is not None)
        if want is not None:
            assert drafts[row].tolist() == want
            some += 1
    assert some > 2


def make(**options):
    return Harness(drafts=4, method="ngram", options=NgramOptions(1, 3), **options)


SYNCHRONOUS = {"max_in_flight": 0, "chunk": 1}
REPLAYED = {"max_in_flight": 3, "chunk": 7, "states": REPLAY}
PREEMPTED = {"num_pages": 16}
SEVERAL = {"steps_per_dispatch": 2, "draft_buckets": (0, 1, 4)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options, params",
    [
        (SYNCHRONOUS, GREEDY),
        (REPLAYED, OF_FEW),
        (PREEMPTED, GREEDY),
        (SEVERAL, OF_FEW),
        soak(SYNCHRONOUS, OF_FEW),
        soak(REPLAYED, GREEDY),
        soak(PREEMPTED, OF_FEW),
        soak(SEVERAL, GREEDY),
    ],
)
def test_looked_up_drafts_change_no_output(params, options, monkeypatch):
    """Laws 1, 3 and 4."""
    engine = make(feature_sets=(params.features,), **options)
    if "draft_buckets" in options:
        rng = np.random.default_rng(0)
        chooser = engine.scheduler.adaptive_drafts
        monkeypatch.setattr(chooser, "choose", lambda *_: int(rng.choice([0, 1, 4])))
    for seed, prompt in enumerate([*REPEATING, *prompts(4), *REPEATING]):
        engine.add(prompt, params, seed)
        engine.step()
    assert engine.run().check() <= 1
    assert sum(request.metrics.num_draft_tokens for request in engine.requests) > 0


@pytest.mark.soak
def test_samples_that_fork_share_the_tokens_of_their_prompt():
    """A fork copies the page that both write to; the others are shared, tokens and all."""
    params = SAMPLED.__class__(temperature=0.8, max_tokens=12, n=3)
    engine = make(feature_sets=(params.features,))
    for prompt in REPEATING:
        for sample in engine.add(prompt, params, seed=3):
            sample.params = SAMPLED
    assert engine.run().check() <= 1


@pytest.mark.soak
def test_drafts_depend_on_the_request_alone():
    """Law 3 for drafts: neighbours, chunks and preemption change none of them."""

    def counts(**options):
        engine = make(**options)
        for prompt in REPEATING:
            engine.add(prompt)
            if options.get("max_in_flight") == 0:
                engine.run()
        engine.run().check()
        return [(r.metrics.num_drafts, r.metrics.accepted_per_position) for r in engine.requests]

    assert counts(max_in_flight=0) == counts(max_in_flight=3, chunk=3)
