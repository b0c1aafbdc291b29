"""Laws 1 and 3 for every sampling parameter, alone and in random company, beside others."""

import dataclasses

import numpy as np
import pytest
from harness import GREEDY, HYBRID, Harness, expected, prompts
from logprobs import check_logprobs
from pairwise import soak

from jaxspec.requests.sampling_features import REPORTS, SamplingFeatures
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling.processors import PROCESSORS

PROMPTS = [prompt for prompt in prompts(100, seed=5) if len(prompt) > 3]
VOCAB = 264
RICHEST = SamplingFeatures.of(*PROCESSORS, *REPORTS)
# How a value of each is drawn.
FIELDS = {
    "top_k": lambda rng: int(rng.integers(1, 200)),
    "top_p": lambda rng: float(rng.uniform(0.3, 0.95)),
    "min_p": lambda rng: float(rng.uniform(0.01, 0.3)),
    "presence_penalty": lambda rng: float(rng.uniform(-2, 2)),
    "frequency_penalty": lambda rng: float(rng.uniform(-2, 2)),
    "repetition_penalty": lambda rng: float(rng.uniform(0.7, 1.6)),
    "logit_bias": lambda rng: dict(
        zip(rng.permutation(VOCAB)[:40].tolist(), rng.normal(size=40).tolist(), strict=True)
    ),
    "allowed_token_ids": lambda rng: rng.permutation(VOCAB)[:150].tolist(),
    "min_tokens": lambda rng: int(rng.integers(1, 6)),
    "logprobs": lambda rng: int(rng.integers(0, 6)),
    "prompt_logprobs": lambda rng: int(rng.integers(0, 4)),
    "num_speculative_tokens": lambda rng: int(rng.integers(0, 3)),
    "n": lambda rng: 2,
}


def drawn(rng, names):
    fields = {name: FIELDS[name](rng) for name in names}
    temperature = float(rng.choice([0.0, 0.7, 1.2]))
    return SamplingParams(temperature=temperature, max_tokens=int(rng.integers(6, 13)), **fields)


def stops_and_words(rng, prompt, params, seed):
    """Stop ids and bad words that the request would meet, each every other time."""
    stops, words = (), ()
    if rng.random() < 0.5:
        words = (tuple(expected(HYBRID, prompt, params, seed).tokens[1:3]),)
    if rng.random() < 0.5:
        tokens = expected(HYBRID, prompt, params, seed, (), words).tokens
        stops = (tokens[-2], *rng.permutation(VOCAB)[:40].tolist())
    return stops, words


@pytest.fixture(scope="module")
def requests():
    """A request for each field alone, and others for random sets of them."""
    rng = np.random.default_rng(0)
    together = [[n for n in FIELDS if rng.random() < 0.4] for _ in range(35)]
    made = []
    for seed, names in enumerate([*((name,) for name in FIELDS), *together]):
        prompt, params = PROMPTS[seed], drawn(rng, names)
        stops, words = stops_and_words(rng, prompt, params, seed)
        if words:  # their texts say that there are some, and here the ids come from the test
            params = dataclasses.replace(params, bad_words=["x"])
        made.append((prompt, params, seed, stops, words))
    return made


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"drafts": 3, "max_in_flight": 2, "num_pages": 40, "chunk": 7},
        {"drafts": 3, "max_in_flight": 3, "steps_per_dispatch": 2},
        soak({"drafts": 0, "max_in_flight": 1, "chunk": 5}),
    ],
    ids=["few pages", "two steps", "plain"],
)
def test_requests_of_all_kinds_get_what_each_gets_alone(options, requests):
    """The oracle knows one request, no drafts and no neighbours; most drafts are right."""
    if options["drafts"]:
        drafts = [(*each[0], *expected(HYBRID, *each).tokens) for each in requests]
        options = options | {"accuracy": (0.8, 0.6, 0.5), "continuations": drafts, "vary": True}
    engine = Harness(HYBRID, feature_sets=(GREEDY.features, RICHEST), **options)
    rng = np.random.default_rng(1)
    for request in requests:
        engine.add(*request)
        for _ in range(rng.integers(0, 4)):
            engine.step()
    engine.run()
    assert engine.check() <= 3
    assert min(check_logprobs(engine)) > 50
    if options["drafts"]:
        assert sum(request.metrics.num_accepted_tokens for request in engine.requests) > 50
