"""An EAGLE-3 head drafts, inside the engine, what the reference's head drafts."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_oracle import Eagle3Oracle
from harness import (
    FIXTURES,
    GREEDY,
    REPLAY,
    SAMPLED,
    Harness,
    drafting,
    heard_drafts,
    model,
    oracle,
    prompts,
)
from pairwise import soak
from safetensors import safe_open

from jaxspec import LLM, SamplingParams, inspect
from jaxspec.models.base import ModelSpec
from jaxspec.models.eagle3 import Eagle3Config, Eagle3Head
from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import DraftModelOptions, Eagle3Options
from jaxspec.parallel import ALONE
from jaxspec.proposers import make_proposer
from jaxspec.requests.sampling_features import GREEDY as GREEDY_SAMPLER

HEAD = "llama_eagle3"
PROMPTS = prompts(5, seed=4, longest=20)


def make(target="llama", *, drafts=3, layers=None, **options):
    given = Eagle3Options("somewhere", aux_layer_ids=layers)
    return Harness(target, drafts=drafts, method="eagle3", options=given, drafter=HEAD, **options)


def vary_draft_counts(engine, monkeypatch):
    rng = np.random.default_rng(0)
    chooser = engine.scheduler.adaptive_drafts
    monkeypatch.setattr(chooser, "choose", lambda *_: int(rng.choice([0, 1, 3])))


def first_drafts(chunk, **options):
    """What is drafted after the reference's prompt, and what the reference drafts there."""
    with safe_open(FIXTURES / HEAD / "reference.safetensors", "np") as file:
        expected = file.get_tensor("draft_ids").tolist()
    with safe_open(FIXTURES / "llama" / "reference.safetensors", "np") as file:
        prompt = file.get_tensor("prompt_ids").tolist()
    engine = make(drafts=4, chunk=chunk, max_in_flight=0, **options)
    request = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=20))[0]
    while not request.output:
        engine.step()
    rows = engine.runner.state.rows
    assert int(rows.num_drafts[0]) == 4
    return np.asarray(rows.drafts)[0].tolist(), expected


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [None, 33])
def test_the_first_drafts_are_the_references(chunk):
    """Recursive drafts after the prompt, the token after each chunk taken from the plan."""
    drafts, expected = first_drafts(chunk)
    assert drafts == expected


@pytest.fixture
def plant(monkeypatch, fresh_programs):
    """Puts a bug into the head, and runs programs that no other test shares."""
    drafting(HEAD, ALONE)  # as the harness asks for it: the loader would refuse it now
    return functools.partial(monkeypatch.setattr, Eagle3Head)


@pytest.mark.soak
def test_the_reference_sees_offsets_that_are_taken_for_ids(plant):
    plant("ids", property(lambda self: self.offsets[...]))
    drafts, expected = first_drafts(None)
    assert drafts != expected


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target", "layers", "options"),
    [
        ("llama", None, {}),
        ("llama", (1, 0, 5), {"chunk": 7, "num_pages": 16}),
        ("llama", None, {"draft_buckets": (0, 1, 3)}),
        ("qwen3", (0, 1, 2), {}),
    ],
    ids=["whole prompts", "chunks and preemption", "several numbers", "qwen3"],
)
def test_drafts_depend_on_the_accepted_text_alone(target, layers, options, monkeypatch):
    """After any number of accepted drafts they are those of a head that sees the text anew."""
    rates = (0.8, 0.6, 0.4)
    engine = make(target, layers=layers, synthetic=rates, max_in_flight=0, **options)
    if "draft_buckets" in options:
        vary_draft_counts(engine, monkeypatch)
    heard = heard_drafts(engine, [(prompt, GREEDY, 0) for prompt in PROMPTS])
    assert len(heard) > 15
    assert sum(request.metrics.num_accepted_tokens for request in engine.requests) > 10
    head = Eagle3Oracle(FIXTURES / HEAD, oracle(target), layers)
    for tokens, drafts in heard:
        head.check(tokens, drafts)


def recycles_the_normed(self, *args, original=Eagle3Head.__call__):
    output, pools = original(self, *args)
    return output.replace(state=output.scored), pools


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("__call__", recycles_the_normed),
        ("features", lambda self, aux: self.fc(jnp.roll(aux, 64, axis=1))[0]),
    ],
    ids=["the normed state recycled", "layers in another order"],
)
def test_the_oracle_sees(name, bug, plant):
    plant(name, bug)
    heard = heard_drafts(make(max_in_flight=0), [(prompt, GREEDY, 0) for prompt in PROMPTS[:2]])
    head = Eagle3Oracle(FIXTURES / HEAD, oracle("llama"))
    with pytest.raises(AssertionError):
        for tokens, drafts in heard:
            head.check(tokens, drafts)


SYNCHRONOUS = {"max_in_flight": 0, "chunk": 1}
CHUNKS = {"max_in_flight": 3, "chunk": 7}
PREEMPTED = {"num_pages": 16}
SEVERAL = {"max_in_flight": 1, "steps_per_dispatch": 2, "draft_buckets": (0, 1, 3)}
HYBRID_TARGET = {"target": "qwen3_5", "states": REPLAY, "chunk": 7}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options, params",
    [
        (SYNCHRONOUS, GREEDY),
        (CHUNKS, SAMPLED),
        (PREEMPTED, SAMPLED),
        (SEVERAL, GREEDY),
        (HYBRID_TARGET, SAMPLED),
        soak(SYNCHRONOUS, SAMPLED),
        soak(CHUNKS, GREEDY),
        soak(PREEMPTED, GREEDY),
        soak(SEVERAL, SAMPLED),
        soak(HYBRID_TARGET, GREEDY),
    ],
)
def test_drafts_change_no_output(options, params, monkeypatch):
    """Laws 1, 3 and 4."""
    engine = make(**{"feature_sets": (params.features,), **options})
    if "draft_buckets" in options:
        vary_draft_counts(engine, monkeypatch)
    for seed, prompt in enumerate(PROMPTS * 2):
        engine.add(prompt, params, seed)
        engine.step()
    assert engine.run().check() <= 1


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("rejection", ["standard", "block"])
def test_drawn_drafts_come_with_what_they_were_drawn_from(rejection):
    feature_sets = (SAMPLED.features, GREEDY_SAMPLER)
    engine = make(
        probabilistic=True, rejection=rejection, feature_sets=feature_sets, max_in_flight=0
    )
    head = Eagle3Oracle(FIXTURES / HEAD, oracle("llama"))
    hot = SamplingParams(temperature=1.5, max_tokens=20)
    heard = heard_drafts(engine, [(prompt, hot, seed) for seed, prompt in enumerate(PROMPTS)])
    assert all(np.isin(drafts, head.ids).all() for _, drafts in heard)
    assert all(len(request.output) == hot.max_tokens for request in engine.requests)
    assert sum(request.metrics.num_accepted_tokens for request in engine.requests) > 0

    request = engine.add(PROMPTS[0], hot)[0]
    while not request.output:
        engine.step()
    slot = int(engine.runner.state.rows.slot[request.row])
    logits = np.asarray(engine.runner.state.draft_logits[slot, 0])
    expected = np.full(264, -np.inf)
    expected[head.ids] = head.after(list(request.tokens)).scores
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-4)

    # Requests that draw nothing run programs without logits.
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY)
    engine.run()
    assert all(len(request.output) == GREEDY.max_tokens for request in engine.requests[-5:])


def recipe_of(name=HEAD, **changes):
    model_spec = ModelSpec.of(drafting(name), jnp.dtype("float32"))
    return model_spec._replace(
        config=model_spec.config.__class__(**vars(model_spec.config) | changes)
    )


def test_the_layers_are_the_users_or_the_heads_or_the_methods():
    own = recipe_of().config.part(Eagle3Config)
    silent = recipe_of(parts=(own.__class__(**vars(own) | {"aux_layer_ids": None}),))
    plain, named = Eagle3Options("a"), Eagle3Options("a", aux_layer_ids=[0, 1, 4])
    for model_spec, options, taps in (
        (recipe_of(), plain, (2, 3, 3)),
        (recipe_of(), named, (0, 1, 4)),
        (silent, plain, (2, 3, 3)),  # 2, half of 6, and the third from the end
    ):
        config = SpeculativeConfig("eagle3", options=options)
        assert make_proposer(config, model("llama"), model_spec).taps == taps


@pytest.mark.parametrize(
    ("target", "layers", "changes", "message"),
    [
        ("llama", None, {"vocab_size": 99}, "the target's 264 ids, and a/b is of 99. Use the head"),
        ("llama_draft", None, {}, "the target's 32 hidden features, and a/b is of 64. Use"),
        ("qwen3", None, {}, r"before layers 0 to 2 of this target, and a/b asks for \[2, 3, 3\]"),
        ("llama", (1, 2, 6), {}, r"layers 0 to 5 .* asks for \[1, 2, 6\]. .* in aux_layer_ids"),
        ("llama", (1, 2), {}, r"must name 3 layers, as many as a/b reads, got \[1, 2\]. Leave"),
    ],
)
def test_a_head_of_another_model_is_refused(target, layers, changes, message):
    config = SpeculativeConfig("eagle3", options=Eagle3Options("a/b", aux_layer_ids=layers))
    with pytest.raises(ValueError, match=message):
        make_proposer(config, model(target), recipe_of(**changes))


def test_heads_and_models_are_not_taken_for_each_other():
    config = SpeculativeConfig("eagle3", options=Eagle3Options("a/b"))
    with pytest.raises(ValueError, match="a/b is none. Use the method 'draft_model'"):
        make_proposer(config, model("llama"), recipe_of("llama_draft"))
    config = SpeculativeConfig("draft_model", options=DraftModelOptions("a/b"))
    with pytest.raises(ValueError, match="a/b is a head that drafts for one. Use .* 'eagle3'"):
        make_proposer(config, model("llama"), recipe_of())


@pytest.mark.soak
def test_a_folder_is_drafted_with_and_its_memory_is_counted():
    speculation = {"method": "eagle3", "model": str(FIXTURES / HEAD)}
    sizes = {"dtype": "float32", "max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [64]}
    options = {"speculative_config": speculation, "max_model_len": 64, **sizes}
    llm = LLM(FIXTURES / "llama", **options)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)[0]
    assert output.metrics.num_draft_tokens > 0
    memory = llm.metrics()["memory_bytes"]
    assert memory["draft/kv"] > 0 and memory["proposer_tables"] > 0
    assert inspect(FIXTURES / "llama", **options).refused == ()
    (why,) = inspect(FIXTURES / HEAD, **sizes).refused
    assert "a head that drafts for a model" in why
