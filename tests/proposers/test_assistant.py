"""An assistant drafts, inside the engine, what transformers' assistant drafts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assistant_oracle import AssistantOracle
from harness import (
    FIXTURES,
    GREEDY,
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
from jaxspec.models.fields import Fields
from jaxspec.models.gemma4_assistant import Gemma4Assistant
from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import AssistantOptions, DraftModelOptions
from jaxspec.proposers import make_proposer

TARGET, ASSISTANT = "gemma4_shared", "gemma4_assistant"
PROMPTS = prompts(5, seed=4, longest=40)
CONFIG = json.loads((FIXTURES / ASSISTANT / "config.json").read_text())
ONE = dataclasses.replace(GREEDY, max_tokens=1)
LENGTHS = [5, 20, 45, 70]  # of prompts; the window is 8


def parse_config(content):
    return Gemma4Assistant.parse_config(Fields(content))


def make(*, drafts=3, **options):
    given = AssistantOptions("somewhere")
    asked = {"method": "assistant", "options": given, "drafter": ASSISTANT}
    return Harness(TARGET, drafts=drafts, **asked, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [None, soak(7)])
def test_the_first_drafts_are_the_references(chunk):
    """For prompts shorter and longer than the window, whole and in chunks."""
    with safe_open(FIXTURES / ASSISTANT / "reference.safetensors", "np") as file:
        prompt = file.get_tensor("prompt_ids").tolist()
        expected = {length: file.get_tensor(f"draft_ids_{length}") for length in LENGTHS}
    engine = make(chunk=chunk, max_in_flight=0)
    for length, drafts in expected.items():
        request = engine.add(prompt[:length], SamplingParams(temperature=0.0, max_tokens=20))[0]
        while not request.output:
            engine.step()
        rows = engine.runner.state.rows
        assert int(rows.num_drafts[request.row]) == 3
        np.testing.assert_array_equal(np.asarray(rows.drafts)[request.row], drafts)


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"chunk": 7, "num_pages": 16}])
def test_drafts_depend_on_the_accepted_text_alone(options):
    """After any number of accepted drafts they are those of an oracle that sees the text anew."""
    engine = make(synthetic=(0.8, 0.6, 0.4), max_in_flight=0, **options)
    heard = heard_drafts(engine, [(prompt, GREEDY, 0) for prompt in PROMPTS])
    assert len(heard) > 15
    assert sum(request.metrics.num_accepted_tokens for request in engine.requests) > 10
    assistant = AssistantOracle(FIXTURES / ASSISTANT, oracle(TARGET))
    for tokens, drafts in heard:
        assistant.check(tokens, drafts)


@pytest.mark.soak
def test_drafts_after_a_hit_depend_on_the_text_alone():
    """At the border of a window, before it and after it."""
    kept = {"prefixes": "all", "num_checkpoints": 40, "num_pages": 120}
    engine = make(synthetic=(0.8, 0.6, 0.4), max_in_flight=0, **kept)
    engine.scheduler.prefixes.min_uncached = 6
    prompt = tuple(np.random.default_rng(5).integers(0, 256, 22).tolist())
    assistant = AssistantOracle(FIXTURES / ASSISTANT, oracle(TARGET))
    for length in (3, 7, 8, 9, 15, 16, 17, 21):
        engine.scheduler.prefixes.clear()
        heard_drafts(engine, [(prompt[:length], ONE, 0)])
        heard = heard_drafts(engine, [(prompt, GREEDY, 0)])
        assert engine.requests[-1].num_cached_tokens == length and len(heard) > 2
        for tokens, drafts in heard:
            assistant.check(tokens, drafts)


SYNCHRONOUS = {"max_in_flight": 0, "chunk": 1}
CHUNKS = {"max_in_flight": 3, "chunk": 7}
PREEMPTED = {"num_pages": 16}
SEVERAL = {"max_in_flight": 1, "steps_per_dispatch": 2, "draft_buckets": (0, 1, 3)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options, params",
    [
        (CHUNKS, GREEDY),
        *(
            soak(*case)
            for case in [
                (SYNCHRONOUS, SAMPLED),
                (PREEMPTED, SAMPLED),
                (SEVERAL, GREEDY),
                ({"probabilistic": True, "rejection": "block"}, GREEDY),
            ]
        ),
    ],
)
def test_drafts_change_no_output(options, params):
    """Laws 1, 3 and 4."""
    engine = make(**{"feature_sets": (params.features,), **options})
    for seed, prompt in enumerate(PROMPTS * 2):
        engine.add(prompt, params, seed)
        engine.step()
    assert engine.run().check() <= 1


def spec_of(name=ASSISTANT, **changes):
    model_spec = ModelSpec.of(drafting(name), jnp.dtype("float32"))
    return model_spec._replace(config=dataclasses.replace(model_spec.config, **changes))


def refused(target, drafter, message, options=None):
    config = SpeculativeConfig("assistant", options=options or AssistantOptions("a/b"))
    with pytest.raises(ValueError, match=message):
        make_proposer(config, model(target), drafter)


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        (TARGET, {"vocab_size": 99}, "number of ids, which is 264, and a/b has 99. Use the assist"),
        (TARGET, {"window": 4}, "the target's window, which is 8, and a/b has 4"),
        (TARGET, {"head_dim": 8}, r"of attention over a window, which is \(1, 16\), and a/b has"),
        ("llama_draft", {}, "the target's hidden size, which is 32, and a/b has 64"),
        ("llama", {}, "the target's window, which is None, and a/b has 8"),
    ],
)
def test_an_assistant_of_another_model_is_refused(target, changes, message):
    refused(target, spec_of(**changes), message)


def test_heads_and_models_are_not_taken_for_assistants():
    refused(TARGET, spec_of(TARGET), "needs an assistant of Gemma 4, and a/b is none. To draft")
    config = SpeculativeConfig("draft_model", options=DraftModelOptions("a/b"))
    with pytest.raises(ValueError, match="is a head that drafts for one. Use .* 'assistant'"):
        make_proposer(config, model(TARGET), spec_of())


def test_keys_and_values_with_scales_are_refused():
    config = dataclasses.replace(parse_config(CONFIG), scales_kv=True)
    with pytest.raises(ValueError, match="stored without scales.* Leave out kv_dtype"):
        jax.eval_shape(lambda: Gemma4Assistant(config, jnp.float32).norm.weight[...])


def test_an_assistant_has_one_table_and_its_clusters_are_not_read():
    for name in ("masked_embedding.centroids.weight", "masked_embedding.token_ordering"):
        assert Gemma4Assistant.canonical_name(name, parse_config(CONFIG)) is None
    assert Gemma4Assistant.copies == {"lm_head.weight": "model.embed_tokens.weight"}
    untied = {"tie_word_embeddings": False}
    with pytest.raises(ValueError, match="`tie_word_embeddings` must be true"):
        parse_config(CONFIG | untied | {"text_config": CONFIG["text_config"] | untied})


@pytest.mark.soak
def test_a_folder_is_drafted_with_in_vllms_spelling():
    """And its memory is counted; it has no pool."""
    speculation = {"method": "mtp", "model": str(FIXTURES / ASSISTANT)}
    sizes = {"dtype": "float32", "max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [64]}
    options = {"speculative_config": speculation, "max_model_len": 64, **sizes}
    with LLM(FIXTURES / TARGET, **options) as llm:
        output = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)[0]
        assert output.metrics.num_draft_tokens > 0
        memory = llm.metrics()["memory_bytes"]
    assert memory["proposer_tables"] > 0 and not any(name.startswith("draft/") for name in memory)
    assert inspect(FIXTURES / TARGET, **options).refused == ()
    (why,) = inspect(FIXTURES / ASSISTANT, **sizes).refused
    assert "a head that drafts for a model" in why and '"method": "assistant"' in why
