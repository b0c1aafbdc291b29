"""A NaN in a drafter's pass costs its drafts: the request goes on as plain decoding would."""

import dataclasses

import harness
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GREEDY, HYBRID, REPLAY, SAMPLED, SNAPSHOT, Harness, folder_of, prompts

from jaxspec.models import load_model
from jaxspec.requests.request import Finish

PROMPTS = prompts(4)
PART = 3  # of the weight or the row that fails


def poison(parameter, index, value=np.nan):
    parameter.set_value(jnp.asarray(parameter[...]).at[index].set(value))


def embedding_of(ids):
    return lambda model: poison(model.trunk.embedding.weight, (jnp.asarray(ids), PART))


HEAD = {  # what fails in every pass: its input, its output by an infinity, or what it attends with
    "projection": lambda model: poison(model.draft_head.fc.weight.array, (PART, PART)),
    "overflow": lambda model: poison(
        model.draft_head.layer.mixer.out.weight.array, (PART, PART), np.inf
    ),
    "queries": lambda model: poison(model.draft_head.layer.mixer.qkv.weight.array, (PART, PART)),
}


@pytest.fixture
def run(monkeypatch):
    """All prompts through an engine whose model is poisoned; the engine and its (first) drafts."""

    def drafted(fixture, params, poisons=None, first=None, **options):
        model = load_model(folder_of(fixture), jnp.dtype("float32"))
        if poisons is not None:
            poisons(model)
        monkeypatch.setattr(harness, "model", lambda *_: model)
        engine = Harness(fixture, drafts=3, feature_sets=(params.features,), **options)
        drafts = set()
        for seed, prompt in enumerate(PROMPTS):
            engine.add(prompt, params, seed)
            engine.step()
        while engine.engine.has_work:
            engine.step()
            rows = engine.runner.state.rows
            read = np.asarray(rows.drafts)[np.asarray(rows.num_drafts) > 0]
            drafts |= set(read[:, :first].ravel().tolist())
        return engine, drafts

    return drafted


def drafted_alone(engine, drafts):
    """Ids that were drafted and never stood in a text."""
    texts = [*PROMPTS, *(request.output for request in engine.requests)]
    return sorted(drafts - {-1} - {token for text in texts for token in text})


def counts(engine):
    metrics = [request.metrics for request in engine.requests]
    return sum(m.num_draft_tokens for m in metrics), sum(m.num_accepted_tokens for m in metrics)


def assert_finished(engine):
    for request in engine.requests:
        assert request.finish is Finish.LENGTH and len(request.output) == request.params.max_tokens
        assert all(0 <= token < engine.vocab_size for token in request.output)


DRAWN = {"probabilistic": True}
BLOCK = DRAWN | {"rejection": "block"}
WAYS = {
    "greedy": (GREEDY, {}),
    "greedy rows of drawn drafts": (GREEDY, DRAWN),
    "sampled": (SAMPLED, {}),
    "drawn": (SAMPLED, DRAWN),
    "block": (SAMPLED, BLOCK),
}
CASES = [*(("projection", way) for way in WAYS), ("overflow", "drawn"), ("queries", "block")]


@pytest.mark.soak
@pytest.mark.parametrize(("what", "way"), CASES, ids=" of ".join)
def test_a_head_that_fails_costs_all_drafts_and_no_token(run, what, way):
    params, options = WAYS[way]
    engine, drafts = run(HYBRID, params, HEAD[what], first=1, **options)
    assert drafts == {-1}
    # Every token is the target's own, also where the drafts that failed were to be drawn.
    assert_finished(engine)
    assert engine.check() <= 1
    num_drafts, num_accepted = counts(engine)
    assert num_drafts > 60 and num_accepted == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fixture", "states", "params"),
    [(HYBRID, SNAPSHOT, GREEDY), (HYBRID, REPLAY, SAMPLED), ("qwen3_5_moe", REPLAY, GREEDY)],
    ids=["snapshot", "replay", "experts"],
)
def test_a_draft_that_the_target_itself_cannot_read_falls(run, fixture, states, params):
    """Its embedding is NaN: so are the head's next pass and the target's own output behind it."""
    sound, drafts = run(fixture, params, states=states)
    alone = drafted_alone(sound, drafts)
    assert len(alone) > 20
    engine, drafts = run(fixture, params, embedding_of(alone), states=states)
    assert -1 in drafts and drafts & set(alone)
    assert_finished(engine)
    assert engine.check() <= 1
    assert [r.output for r in engine.requests] == [r.output for r in sound.requests]


@pytest.mark.soak
@pytest.mark.parametrize("options", [DRAWN, BLOCK], ids=["standard", "block"])
def test_a_drawn_draft_that_the_target_itself_cannot_read_falls(run, options):
    params = dataclasses.replace(SAMPLED, temperature=0.3)
    sound, drafts = run(HYBRID, params, **options)
    alone = drafted_alone(sound, drafts)
    engine, drafts = run(HYBRID, params, embedding_of(alone), **options)
    assert drafts & set(alone)
    # By chance the target may take one of these ids itself, and then it fails as it should.
    taken = [set(request.output) & set(alone) for request in engine.requests]
    assert sum(map(bool, taken)) <= 1
    for request, ids in zip(engine.requests, taken, strict=True):
        assert request.finish is (Finish.ERROR if ids else Finish.LENGTH)


@pytest.mark.soak
def test_keys_of_a_failed_pass_cost_drafts_alone_and_leave_no_trace(run):
    """The head's own keys and values turn NaN while requests run; others use the pages later."""
    engine = Harness(HYBRID, drafts=3)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, GREEDY, seed)
    while len(engine.requests[-1].output) < 2:
        engine.step()
    state = engine.runner.state
    poisoned = state.pools | {"kv": state.pools["kv"].at[-1].set(np.nan)}  # the head's layer
    engine.runner._state = state.replace(pools=poisoned)
    victims = list(engine.scheduler.running)
    engine.step()
    drafts = []
    while engine.engine.has_work:
        engine.step()
        rows = engine.runner.state.rows
        drafts += np.asarray(rows.drafts)[np.asarray(rows.num_drafts) > 0, 0].tolist()
    assert victims and drafts and set(drafts[len(victims) :]) == {-1}
    engine.add(PROMPTS[0], GREEDY, 9)  # on pages that hold NaN
    while not engine.requests[-1].output:
        engine.step()
    rows = engine.runner.state.rows
    assert (np.asarray(rows.drafts)[np.asarray(rows.num_drafts) > 0] >= 0).all()
    engine.run()
    assert_finished(engine)
    assert engine.check() <= 1
