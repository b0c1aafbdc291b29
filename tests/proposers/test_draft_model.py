"""A second model's drafts: those of its own greedy text, whatever the target and the batch do."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES, GREEDY, REPLAY, SAMPLED, SNAPSHOT, Harness, model, oracle, prompts

from jaxspec import LLM, SamplingParams
from jaxspec.config import StateConfig
from jaxspec.models.base import ModelRecipe
from jaxspec.proposers import make_proposer
from jaxspec.speculation import SpeculativeConfig
from jaxspec.speculation.draft_model import DraftModelOptions

OPTIONS = DraftModelOptions("somewhere")
PROMPTS = prompts(5, seed=4, longest=20)


def make(target, drafter, **options):
    return Harness(
        target, drafts=3, method="draft_model", options=OPTIONS, drafter=drafter, **options
    )


# With a window of 8 the passes behind a verify of 4 accepted tokens find the ring full.
@pytest.mark.parametrize(
    "states",
    [SNAPSHOT, REPLAY, StateConfig("replay", window=8)],
    ids=["snapshot", "replay", "full"],
)
@pytest.mark.parametrize("fixture", ["llama", "qwen3_5"])
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


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 0, "chunk": 1},
        {"max_in_flight": 3, "chunk": 7, "states": REPLAY},
        {"num_pages": 16, "states": REPLAY},
        {"steps_per_dispatch": 2, "draft_counts": (0, 1, 3), "states": REPLAY},
        {"steps_per_dispatch": 2, "draft_counts": (0, 1, 3)},
    ],
    ids=["synchronous", "replay", "preemption", "several numbers", "several, snapshots"],
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_of_another_model_change_no_output(params, options, monkeypatch):
    """Laws 1, 3 and 4, with a hybrid drafter and an attention target."""
    engine = make("llama", "qwen3_5", samplers=(params.sampler,), **options)
    if "draft_counts" in options:
        rng = np.random.default_rng(0)
        chooser = engine.scheduler.draft_count
        monkeypatch.setattr(chooser, "choose", lambda *_: int(rng.choice([0, 1, 3])))
    for seed, prompt in enumerate(PROMPTS * 2):
        engine.add(prompt, params, seed)
        engine.step()
    assert engine.run().check() <= 1


@pytest.mark.parametrize("states", [SNAPSHOT, REPLAY], ids=["snapshot", "replay"])
def test_a_hybrid_drafter_is_right_where_the_number_of_drafts_changes(states, monkeypatch):
    """Its states survive steps without drafts, and passes that are not counted."""
    long = SamplingParams(temperature=0.0, max_tokens=40)
    engine = make("qwen3_5", "qwen3_5", states=states, draft_counts=(0, 1, 3))
    rng = np.random.default_rng(2)
    chooser = engine.scheduler.draft_count
    monkeypatch.setattr(chooser, "choose", lambda *_: int(rng.choice([0, 1, 3])))
    for prompt in PROMPTS:
        engine.add(prompt, long)
    engine.run().check()
    for request in engine.requests:
        assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens > 5


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


def test_drawn_drafts_are_verified_by_rejection_sampling():
    engine = make("llama", "llama_draft", samplers=(SAMPLED.sampler,), probabilistic=True)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, SAMPLED, seed)
    engine.run()
    assert all(len(request.output) == SAMPLED.max_tokens for request in engine.requests)
    accepted = sum(request.metrics.num_accepted_tokens for request in engine.requests)
    assert accepted > 0


def test_a_drafter_of_another_vocabulary_is_refused():
    recipe = ModelRecipe.of(model("llama_draft"), jnp.dtype("float32"))
    other = recipe.config.__class__(**vars(recipe.config) | {"vocab_size": 99})
    config = SpeculativeConfig("draft_model", options=OPTIONS)
    with pytest.raises(ValueError, match="vocabulary of 264 ids, and somewhere has 99"):
        make_proposer(config, model("llama"), recipe._replace(config=other))


def test_a_folder_is_drafted_with_and_its_memory_is_counted():
    speculation = {"method": "draft_model", "model": str(FIXTURES / "llama_draft")}
    sizes = {"dtype": "float32", "max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [64]}
    llm = LLM(FIXTURES / "llama", speculative_config=speculation, max_model_len=64, **sizes)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)[0]
    assert output.metrics.num_draft_tokens > 0
    memory = llm.metrics()["memory_bytes"]
    assert memory["draft/kv"] > 0 and memory["proposer_tables"] > 0
