"""The laws for models that several devices share: their tokens are those of the oracle, too."""

import numpy as np
import pytest
from harness import (
    GREEDY,
    HYBRID,
    REPLAY,
    SAMPLED,
    SNAPSHOT,
    Harness,
    continuations,
    prompts,
)

from jaxspec.parallel import Group
from jaxspec.requests.sampling_params import SamplingParams

PROMPTS = prompts(5, seed=3)
PAIR, FOUR = Group(2), Group(4)
NUCLEUS = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_tokens=12)


def known(fixture, params):
    return continuations(fixture, [(prompt, params, seed) for seed, prompt in enumerate(PROMPTS)])


def served(engine: Harness, params: SamplingParams, seed: int = 0) -> Harness:
    """Add a request now and then, and run them all."""
    rng = np.random.default_rng(seed)
    for number, prompt in enumerate(PROMPTS):
        engine.add(prompt, params, number)
        for _ in range(rng.integers(0, 4)):
            engine.step()
            assert_replicas_are_equal(engine)
    return engine.run()


def assert_replicas_are_equal(engine: Harness) -> None:
    """Every device has the same rows and page tables, bit for bit."""
    for array in (engine.runner.state.rows.fields, engine.runner.state.page_tables):
        first, *others = np.split(np.asarray(array), array.sharding.mesh.size)
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize(
    ("fixture", "group", "states", "drafts", "params"),
    [
        (HYBRID, PAIR, SNAPSHOT, 3, GREEDY),
        (HYBRID, PAIR, REPLAY, 3, NUCLEUS),
        (HYBRID, PAIR, REPLAY, 0, SAMPLED),
        ("qwen3_5_moe", PAIR, REPLAY, 3, GREEDY),
        ("nemotron_h", FOUR, REPLAY, 3, GREEDY),
        ("falcon_h1", PAIR, SNAPSHOT, 3, SAMPLED),
        ("granitemoehybrid", FOUR, SNAPSHOT, 0, GREEDY),
        ("lfm2", FOUR, SNAPSHOT, 3, GREEDY),
        ("qwen3", FOUR, SNAPSHOT, 3, NUCLEUS),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, SamplingParams) else str(each),
)
def test_tokens_are_those_of_one_device(fixture, group, states, drafts, params):
    engine = Harness(
        fixture,
        group=group,
        states=states,
        drafts=drafts,
        accuracy=(0.8, 0.5, 0.5) if drafts else None,
        continuations=known(fixture, params) if drafts else (),
        vary=bool(drafts),
        feature_sets=(params.features,),
        chunk=7,
    )
    assert served(engine, params).check() <= 1
