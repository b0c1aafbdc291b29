"""Experts of tokens of models with published numbers of experts, and their replay."""

import jax
import numpy as np
import pytest
from pairwise import soak
from real_models import make_llm, write_small

import jaxspec
from benchmarks.published import MODELS
from jaxspec import SamplingParams

PROMPT = {"prompt_token_ids": [*range(1000, 1020)]}
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=0)
OPTIONS = {"max_model_len": 64, "skip_tokenizer_init": True, "speculative_config": None}
NAMES = ("qwen3.5-35b-a3b", soak("nemotron-3.5-lightning-30b-a3b"), soak("lfm2-8b-a1b"))


@pytest.fixture(scope="module", params=NAMES)
def routed(request, tmp_path_factory):
    """The engine, a text of it, and the output."""
    folder = write_small(request.param, tmp_path_factory.mktemp(request.param))
    with make_llm(folder, enable_return_routed_experts=True, **OPTIONS) as llm:
        (sample,) = llm.generate(PROMPT, PARAMS)[0].outputs
        config = MODELS[request.param].config
        top_k = config.get("text_config", config)["num_experts_per_tok"]
        yield llm, [*PROMPT["prompt_token_ids"], *sample.token_ids], sample, top_k


@pytest.mark.soak
def test_each_token_has_experts_of_its_own(routed):
    _, text, sample, top_k = routed
    experts = sample.routed_experts
    assert experts.shape[::2] == (len(text) - 1, top_k)
    assert all(len({*row}) == top_k for row in experts.reshape(experts[..., 0].size, top_k))
    assert len(np.unique(experts)) > 2 * top_k


@pytest.mark.soak
def test_replayed_experts_give_the_logprobs_of_the_sampler(routed):
    llm, text, sample, _ = routed
    model = jaxspec.differentiable(llm)
    tokens, experts = np.array([text]), sample.routed_experts[None]
    found = jax.jit(model.logprobs)(
        model.params, tokens, np.array([len(text)]), routed_experts=experts
    )
    want = sample.token_logprobs
    np.testing.assert_allclose(found[0, -len(want) :], want, rtol=0, atol=1e-3)
