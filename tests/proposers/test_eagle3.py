"""An EAGLE-3 head drafts, inside the engine, what the reference head drafts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES, GREEDY, SAMPLED, Harness, drafting, model, prompts
from safetensors import safe_open

from jaxspec import LLM, SamplingParams
from jaxspec.models.base import ModelRecipe
from jaxspec.models.eagle3 import Eagle3Config, Eagle3Head
from jaxspec.proposers import make_proposer
from jaxspec.speculation import SpeculativeConfig
from jaxspec.speculation.draft_model import DraftModelOptions
from jaxspec.speculation.eagle3 import Eagle3Options

HEAD = "llama_eagle3"
PROMPTS = prompts(5, seed=4, longest=20)


def make(*, drafts=3, layers=None, **options):
    given = Eagle3Options("somewhere", aux_layer_ids=layers)
    return Harness("llama", drafts=drafts, method="eagle3", options=given, drafter=HEAD, **options)


def first_drafts(chunk, **options):
    """What follows the reference's prompt, and what the reference drafts there."""
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


@pytest.mark.parametrize("chunk", [None, 33])
def test_the_first_drafts_are_the_references(chunk):
    """Recursive drafts after the prompt, the token after each chunk taken from the plan."""
    drafts, expected = first_drafts(chunk)
    assert drafts == expected


@pytest.fixture
def planted(monkeypatch):
    """A bug in the head, in programs that no other test shares."""
    from jaxspec.runner.model_runner import jitted_step

    def plant(name, wrong):
        monkeypatch.setattr(Eagle3Head, name, wrong)

    jitted_step.cache_clear()
    yield plant
    monkeypatch.undo()
    jitted_step.cache_clear()


def test_the_reference_sees_offsets_that_are_taken_for_ids(planted):
    planted("ids", property(lambda self: self.offsets[...]))
    drafts, expected = first_drafts(None)
    assert drafts != expected


def test_the_reference_sees_other_layers():
    drafts, expected = first_drafts(None, layers=(1, 2, 2))
    assert drafts != expected
