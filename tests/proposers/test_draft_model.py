"""A second model's drafts: those of its own greedy text, whatever the target and the batch do."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    FIXTURES,
    GREEDY,
    HYBRID,
    REPLAY,
    SAMPLED,
    SNAPSHOT,
    Harness,
    model,
    oracle,
    prompts,
)
from pairwise import soak

from jaxspec import LLM, SamplingParams
from jaxspec.models.base import ModelSpec
from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import DraftModelOptions
from jaxspec.plan.step_shapes import StateConfig
from jaxspec.proposers import make_proposer

OPTIONS = DraftModelOptions("somewhere")
PROMPTS = prompts(5, seed=4, longest=20)


def make(target, drafter, **options):
    return Harness(
        target, drafts=3, method="draft_model", options=OPTIONS, drafter=drafter, **options
    )


# With a window of 8 the passes behind a verify of 4 accepted tokens find the ring full.
@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fixture, states",
    [
        ("llama_draft", SNAPSHOT),
        (HYBRID, SNAPSHOT),
        (HYBRID, REPLAY),
        (HYBRID, StateConfig("replay", window=8)),
    ],
    ids=["attention", "snapshot", "replay", "full"],
)
def test_a_model_that_drafts_for_itself_is_always_right(fixture, states):
    """So its state is that of the accepted text, after any number of accepted drafts."""
    long = SamplingParams(temperature=0.0, max_tokens=40)
    engine = make(fixture, fixture, states=states, chunk=7)
    for prompt in PROMPTS:
        engine.add(prompt, long)
    assert engine.run().check() == 0
    for request in engine.requests:
        metrics = request.metrics
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 25


SYNCHRONOUS = {"max_in_flight": 0, "chunk": 1}
REPLAYED = {"max_in_flight": 3, "chunk": 7, "states": REPLAY}
PREEMPTED = {"num_pages": 16, "states": REPLAY}
SEVERAL = {"steps_per_dispatch": 2, "draft_buckets": (0, 1, 3)}
SEVERAL_REPLAYED = {**SEVERAL, "states": REPLAY}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options, params",
    [
        (SYNCHRONOUS, GREEDY),
        (REPLAYED, SAMPLED),
        (PREEMPTED, SAMPLED),
        (SEVERAL_REPLAYED, GREEDY),
        soak(SYNCHRONOUS, SAMPLED),
        soak(REPLAYED, GREEDY),
        soak(PREEMPTED, GREEDY),
        soak(SEVERAL_REPLAYED, SAMPLED),
        soak(SEVERAL, GREEDY),
        soak(SEVERAL, SAMPLED),
    ],
)
def test_drafts_of_another_model_change_no_output(options, params, monkeypatch):
    """Laws 1, 3 and 4, with a hybrid drafter and an attention target."""
    engine = make("llama_draft", HYBRID, feature_sets=(params.features,), **options)
    if "draft_buckets" in options:
        rng = np.random.default_rng(0)
        chooser = engine.scheduler.adaptive_drafts
        monkeypatch.setattr(chooser, "choose", lambda *_: int(rng.choice([0, 1, 3])))
    for seed, prompt in enumerate(PROMPTS * 2):
        engine.add(prompt, params, seed)
        engine.step()
    assert engine.run().check() <= 1


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("states", [SNAPSHOT, REPLAY], ids=["snapshot", "replay"])
def test_a_hybrid_drafter_is_right_where_the_number_of_drafts_changes(states, monkeypatch):
    """Its states survive steps without drafts, and passes that are not counted."""
    long = SamplingParams(temperature=0.0, max_tokens=40)
    engine = make(HYBRID, HYBRID, states=states, draft_buckets=(0, 1, 3))
    rng = np.random.default_rng(2)
    chooser = engine.scheduler.adaptive_drafts
    monkeypatch.setattr(chooser, "choose", lambda *_: int(rng.choice([0, 1, 3])))
    for prompt in PROMPTS:
        engine.add(prompt, long)
    engine.run().check()
    for request in engine.requests:
        assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens > 5


@pytest.mark.soak
def test_drafts_equal_the_drafters_own_greedy_text():
    """`llama_draft` drafts for `llama` what it would say itself, by the NumPy oracle."""
    engine, heard = make("llama", "llama_draft", max_in_flight=0), []
    for prompt in PROMPTS[:2]:
        engine.add(prompt)
        while engine.engine.has_work:
            engine.step()
            rows = engine.runner.state.rows
            heard += [
                (
                    list(request.tokens),
                    np.asarray(rows.drafts[request.row]).tolist(),
                    request.max_len,
                )
                for request in engine.scheduler.running
                if int(rows.num_drafts[request.row])
            ]
    assert len(heard) > 10
    for tokens, drafts, end in heard:
        run = oracle("llama_draft").start()
        for token in tokens:
            scores = run.feed(token)
        for draft in drafts[: end - len(tokens)]:  # none is verified behind the end
            assert scores[draft] >= np.max(scores) - 1e-3
            scores = run.feed(draft)


@pytest.mark.soak
def test_drawn_drafts_are_verified_by_rejection_sampling():
    engine = make(HYBRID, "llama_draft", feature_sets=(SAMPLED.features,), probabilistic=True)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, SAMPLED, seed)
    engine.run()
    assert all(len(request.output) == SAMPLED.max_tokens for request in engine.requests)
    accepted = sum(request.metrics.num_accepted_tokens for request in engine.requests)
    assert accepted > 0


def test_a_drafter_of_another_vocabulary_is_refused():
    model_spec = ModelSpec.of(model("llama_draft"), jnp.dtype("float32"))
    other = model_spec.config.__class__(**vars(model_spec.config) | {"vocab_size": 99})
    config = SpeculativeConfig("draft_model", options=OPTIONS)
    with pytest.raises(ValueError, match="vocabulary of 264 ids, and somewhere has 99"):
        make_proposer(config, model("llama"), model_spec._replace(config=other))


@pytest.mark.soak
def test_a_folder_is_drafted_with_and_its_memory_is_counted():
    speculation = {"method": "draft_model", "model": str(FIXTURES / "llama_draft")}
    sizes = {"dtype": "float32", "max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [64]}
    llm = LLM(FIXTURES / "llama", speculative_config=speculation, max_model_len=64, **sizes)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)[0]
    assert output.metrics.num_draft_tokens > 0
    memory = llm.metrics()["memory_bytes"]
    assert memory["draft/kv"] > 0 and memory["proposer_tables"] > 0
