"""The laws for Falcon-H1 (two pools per layer), LFM2 (no state policy) and Kimi-Linear."""

import dataclasses

import numpy as np
import pytest
from harness import (
    FIXTURES,
    GREEDY,
    REPLAY,
    SAMPLED,
    SNAPSHOT,
    Harness,
    continuations,
    prompts,
)
from safetensors import safe_open

import jaxspec
from jaxspec.requests.sampling_params import SamplingParams

PROMPTS = prompts(5, seed=7)
KINDS = [
    *(("falcon_h1", SNAPSHOT), ("falcon_h1", REPLAY), ("lfm2", SNAPSHOT)),
    *(("kimi_linear", SNAPSHOT), ("kimi_linear", REPLAY)),
]
BOTH = pytest.mark.parametrize(
    ("fixture", "states"),
    KINDS,
    ids=["Falcon-H1", "Falcon-H1 replayed", "LFM2", "Kimi-Linear", "Kimi-Linear replayed"],
)
MIXED = (0.8, 0.5, 0.5)


def known(fixture, params):
    return continuations(fixture, [(prompt, params, seed) for seed, prompt in enumerate(PROMPTS)])


@pytest.mark.soak
@pytest.mark.few(1)
@BOTH
@pytest.mark.parametrize("drafts", [0, 3])
def test_greedy_ids_equal_the_reference(fixture, states, drafts):
    """Through chunked prefill and with drafts that the request's own text gives."""
    with safe_open(FIXTURES / fixture / "reference.safetensors", "np") as file:
        prompt, greedy = (file.get_tensor(name).tolist() for name in ("prompt_ids", "greedy_ids"))
    params = SamplingParams(temperature=0.0, max_tokens=len(greedy))
    engine = Harness(fixture, drafts=drafts, method="ngram", chunk=33, states=states)
    engine.add(prompt, params)
    engine.run()
    assert engine.requests[0].output == greedy


@pytest.mark.few(1)
@BOTH
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_never_changes_output(fixture, states, params):
    """Laws 1, 3 and 4: drafts of which some are wrong, requests that come while others run."""
    for depth, chunk in ((0, 7), (2, 64), (3, 1))[: 2 + (params is GREEDY)]:
        engine = Harness(
            fixture,
            drafts=3,
            accuracy=MIXED,
            continuations=known(fixture, params),
            vary=True,
            feature_sets=(params.features,),
            max_in_flight=depth,
            chunk=chunk,
            states=states,
        )
        rng = np.random.default_rng(depth)
        for seed, prompt in enumerate(PROMPTS):
            engine.add(prompt, params, seed)
            for _ in range(rng.integers(0, 4)):
                engine.step()
        assert engine.run().check() <= 1
        accepted = [request.metrics.num_accepted_tokens for request in engine.requests]
        assert 0 < sum(accepted) < sum(r.metrics.num_draft_tokens for r in engine.requests)


@pytest.mark.soak
@pytest.mark.few(2)
@BOTH
def test_samples_of_a_prompt_are_as_if_each_were_alone(fixture, states):
    """A copied slot has the pools of its source: keys, inputs of convolutions, and states."""
    params = dataclasses.replace(SAMPLED, n=3)
    engine = Harness(fixture, feature_sets=(params.features,), states=states, chunk=5)
    samples = [sample for prompt in PROMPTS[:2] for sample in engine.add(prompt, params, 11)]
    for sample in samples:
        sample.params = SAMPLED
    assert engine.run().check() <= 1
    assert len({tuple(sample.output) for sample in samples[:3]}) == 3


@pytest.mark.soak
@pytest.mark.few(2)
@BOTH
def test_preemption_changes_no_token(fixture, states):
    """A request that comes back computes its prompt anew, over what others left in the slot."""
    engine = Harness(fixture, states=states, num_pages=16, chunk=7)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, GREEDY, seed)
    assert engine.run().check() <= 1
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("fixture", "layers"),
    [
        ("falcon_h1", {"Parallel + GatedMLP": 3}),
        ("lfm2", {"ShortConv + GatedMLP": 3, "Attention + GatedMLP": 1}),
        (
            "bailing_hybrid",
            {"KimiDelta + GatedMLP": 1, "KimiDelta + MoE": 1, "LatentAttention + MoE": 2},
        ),
        (
            "kimi_linear",
            {"KimiDelta + GatedMLP": 1, "KimiDelta + MoE": 2, "LatentAttention + MoE": 1},
        ),
    ],
)
def test_inspection_tells_what_they_are(fixture, layers):
    found = jaxspec.inspect(FIXTURES / fixture)
    assert found.refused == () and found.layers == layers and found.cache.request > 0
    assert "Nothing of it is refused." in str(found)
