"""A model of one's own: the example of docs/models.md, and what cannot be registered."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import prompts

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.models import HEADS, MODELS, family_of
from jaxspec.models.llama import Llama

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
NAME = "ThirdsForCausalLM"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """What the example defines, after a run of it in an empty folder."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    namespace = {"__name__": "example"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("example"))
        patch.setattr("jaxspec.models.MODELS", MODELS.copy())
        for block in blocks:
            exec(compile(block, PAGE, "exec"), namespace)
        namespace["folder"] = namespace["folder"].absolute()
        yield SimpleNamespace(**namespace)


@pytest.fixture(scope="module")
def llm(example):
    with LLM(example.folder, speculative_config=example.drafts, **example.options) as llm:
        yield llm


def test_drafts_were_accepted_and_changed_no_token(example):
    with_drafts, without = example.with_drafts, example.without
    assert with_drafts.outputs[0].token_ids == without.outputs[0].token_ids
    assert len(without.outputs[0].token_ids) == 24
    assert sum(with_drafts.metrics.accepted_per_position) > 0


@pytest.mark.soak
def test_sampled_tokens_are_scored_and_differentiated_as_they_were_drawn(llm):
    params = SamplingParams(temperature=1.0, max_tokens=16, logprobs=0, seed=1, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": list(prompts(1, seed=2)[0])}, params)[0]
    drawn = output.outputs[0]
    text = [*output.prompt_token_ids, *drawn.token_ids]
    (scored,) = llm.score([{"prompt_token_ids": text}])
    model = jaxspec.differentiable(llm)
    tokens, lengths = np.array([text]), np.array([len(text)])
    found = jax.jit(model.logprobs)(model.params, tokens, lengths)
    for logprobs in (scored.token_logprobs[-16:], found[0, -16:]):
        np.testing.assert_allclose(logprobs, drawn.token_logprobs, rtol=0, atol=1e-5)


def test_the_layer_of_the_example_is_its_formula(example, llm):
    (first, *_) = llm._runner.model().trunk.layers
    stream = jnp.asarray(np.random.default_rng(0).normal(size=(5, 64)), jnp.float32)
    before, pending = first.feed_forward(stream, None, first.feed_forward_norm, jnp.ones(5, bool))
    normed = np.asarray(first.feed_forward_norm(stream))
    tensors = llm.export_weights()
    prefix = "model.layers.0.mlp."
    gate, up, down = (tensors[f"{prefix}{x}_proj.weight"].T for x in ("gate", "up", "down"))
    want = (np.asarray(jax.nn.gelu(normed @ gate)) * (normed @ up)) @ down
    np.testing.assert_array_equal(before, stream)
    np.testing.assert_allclose(np.asarray(pending).reshape(5, 64), want, atol=1e-5)


def test_its_weights_are_updated_by_all_spellings_of_names(example, llm):
    tree = llm.export_weights()
    spelled = {name.replace("model.", "backbone.", 1): x * 0.5 for name, x in tree.items()}
    llm.update_weights(spelled)
    changed = llm.export_weights()
    for name, x in tree.items():
        np.testing.assert_allclose(changed[name], x * 0.5, rtol=1e-6)
    llm.update_weights(tree)


@pytest.mark.parametrize("name", ["", "two words", 3, None])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="architecture must be"):
        jaxspec.register_model(name, Llama)


@pytest.mark.parametrize("model", ["llama:Llama", dict, None, jaxspec.Model])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="model must"):
        jaxspec.register_model("Mine", model)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", next(iter(HEADS))])
def test_no_model_or_head_is_replaced(name):
    with pytest.raises(ValueError, match="no other class"):
        jaxspec.register_model(name, Llama)


def test_a_class_may_be_registered_again(monkeypatch):
    monkeypatch.setattr("jaxspec.models.MODELS", MODELS.copy())
    for _ in range(2):
        jaxspec.register_model("Mine", Llama)
    with pytest.raises(ValueError, match="no other class"):
        jaxspec.register_model("Mine", type("Other", (Llama,), {}))


def test_a_class_that_a_notebook_defines_anew_takes_its_place(monkeypatch):
    monkeypatch.setattr("jaxspec.models.MODELS", MODELS.copy())
    for _ in range(2):
        again = type("Again", (Llama,), {})
        jaxspec.register_model("my-model", again)
        assert family_of("my-model", "config.json") is again
