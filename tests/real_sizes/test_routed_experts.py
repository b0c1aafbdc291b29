"""Experts of tokens of models with published numbers of experts, replayed in whole texts."""

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


@pytest.mark.parametrize("name", NAMES)
def test_replayed_experts_give_the_logprobs_of_the_sampler(name, tmp_path):
    folder = write_small(name, tmp_path)
    with make_llm(folder, enable_return_routed_experts=True, **OPTIONS) as llm:
        (sample,) = llm.generate(PROMPT, PARAMS)[0].outputs
        text = [*PROMPT["prompt_token_ids"], *sample.token_ids]
        experts, config = sample.routed_experts, MODELS[name].config
        config = config.get("text_config", config)
        assert experts.shape[::2] == (len(text) - 1, config["num_experts_per_tok"])
        assert len(np.unique(experts)) > 2 * experts.shape[2]
        model = jaxspec.differentiable(llm)
        found = jax.jit(model.logprobs)(
            model.params, np.array([text]), np.array([len(text)]), routed_experts=experts[None]
        )
        want = sample.token_logprobs
        np.testing.assert_allclose(found[0, -len(want) :], want, rtol=0, atol=1e-3)
