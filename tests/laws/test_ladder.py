"""Every row gets what its request asks for, whichever rung of the ladder runs it; planted bugs."""

import pytest
from harness import Harness, prompts

from jaxspec import SamplingParams
from jaxspec.requests.sampling_features import (
    BIAS,
    LADDER,
    PENALTIES,
    SMALL_TOP_K,
    TEMPERATURE,
    SamplingFeatures,
)
from jaxspec.scheduler import ready_programs, scheduler
from jaxspec.scheduler.ready_programs import ReadyPrograms

SAMPLED = {"temperature": 0.8, "max_tokens": 10}
KINDS = [
    SamplingParams(temperature=0.0, max_tokens=10),
    SamplingParams(**SAMPLED, top_k=20),
    SamplingParams(**SAMPLED, top_p=0.6, min_p=0.02),
    SamplingParams(**SAMPLED, frequency_penalty=2.0, repetition_penalty=5.0),
    SamplingParams(temperature=0.0, max_tokens=10, logit_bias={7: 4.0, 9: -100.0}),
]
CALLS = [[kind] * 2 for kind in KINDS] + [KINDS, KINDS[:2], KINDS[1:4]]


@pytest.fixture(scope="module")
def engine():
    return Harness("qwen3", feature_sets=LADDER, prefill_tokens=(16,), chunk=7)


def run(engine):
    """Kinds one after the other, then together, while rungs come and go with the rows."""
    engine.requests.clear()
    for number, kinds in enumerate(CALLS):
        for seed, (prompt, params) in enumerate(
            zip(prompts(len(kinds), number), kinds, strict=True)
        ):
            engine.add(prompt, params, seed)
        engine.run()
    assert engine.check() <= 1


@pytest.fixture
def chosen(monkeypatch):
    """The rungs that steps ran with."""
    rungs = set()
    choose = ReadyPrograms.choose

    def choose_and_note(self, needs):
        program = choose(self, needs)
        rungs.add(program.features)
        return program

    monkeypatch.setattr(ReadyPrograms, "choose", choose_and_note)
    return rungs


@pytest.mark.soak
def test_no_rung_changes_a_token(engine, chosen):
    run(engine)
    assert chosen == set(LADDER[:3])


def drops(*features):
    """A rung is taken for requests that need features which it lacks."""
    can_run = ready_programs._can_run

    def without(program, needs):
        left = [name for name in needs.features.names if name not in features]
        return can_run(program, needs._replace(features=SamplingFeatures.of(*left)))

    return ready_programs, "_can_run", without


def of_a_neighbour():
    """A step takes the rung of its first row for all of them."""
    return scheduler, "join", lambda feature_sets: next(iter(feature_sets))


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "bug",
    [drops(TEMPERATURE, SMALL_TOP_K), drops(PENALTIES), drops(BIAS), of_a_neighbour()],
    ids=["no temperature", "no penalties", "no bias", "the first row's rung"],
)
def test_a_planted_bug_is_seen(engine, bug, monkeypatch):
    monkeypatch.setattr(*bug)
    engine.scheduler.programs._chosen.clear()
    try:
        with pytest.raises(AssertionError):
            run(engine)
    finally:
        monkeypatch.undo()
        engine.scheduler.programs._chosen.clear()
