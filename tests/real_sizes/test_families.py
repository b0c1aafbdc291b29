"""Every family at its vocabulary, heads and experts: the first call, greedy, seeds and drafts.

Weights are random, and scores far enough apart that rounding changes no token. Draft heads guess
wrongly then. The families without one draft what followed in earlier requests, which is right when
a request is repeated; an n-gram look-up would find no match in random output.
"""

import pytest
from pairwise import soak
from real_models import make_llm, vocabulary, write_small

from benchmarks.published import MODELS
from jaxspec import SamplingParams

PROMPT = 50  # tokens
LENGTH = 62  # of a prompt and its output, for calls without parameters ask for 128 tokens
ONE_ROW = {"max_num_seqs": 1, "decode_buckets": [1]}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
# One model of each family and kind of layer; those left out have other sizes of the same.
NAMES = ["qwen3.5-35b-a3b", "falcon-h1-1.5b"]
OTHER_NAMES = [
    "llama-3.1-8b",
    "nemotron-3.5-lightning-30b-a3b",
    "lfm2-8b-a1b",
    "qwen3.5-0.8b",
    "qwen3-next-80b-a3b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "granite-4-h-small",
    "granite-3.3-8b",
    "qwen2.5-14b",
    "mistral-7b-v0.3",
    "gpt-oss-20b",
    "gemma-4-26b-a4b",
    "gemma-4-e2b",
    "mamba2-2.7b",
    "lfm2-1.2b",
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-4.7-flash",
    "glm-4.5-air",
    "kimi-linear-48b-a3b",
    "ling-3.0-flash",
]
HAVE_HEADS = {
    "qwen3.5-0.8b",
    "qwen3.5-35b-a3b",
    "qwen3-next-80b-a3b",
    "nemotron-3.5-lightning-30b-a3b",
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-4.7-flash",
    "glm-4.5-air",
    "ling-3.0-flash",
}


@pytest.fixture(scope="module", params=[*NAMES, *map(soak, OTHER_NAMES)])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def llm(name, tmp_path_factory):
    """With the drafts that it has by default, or by look-up where it has none."""
    folder = write_small(name, tmp_path_factory.mktemp(name))
    drafts = "auto" if name in HAVE_HEADS else SUFFIX
    options = ONE_ROW | {"max_model_len": LENGTH, "skip_tokenizer_init": True}
    with make_llm(folder, speculative_config=drafts, **options) as made:
        yield made


@pytest.fixture(scope="module")
def prompt(name):
    """Ids from all of the vocabulary, no two alike."""
    last = vocabulary(name) - 1
    return {"prompt_token_ids": [number * last // (PROMPT - 1) for number in range(PROMPT)]}


def test_every_family_is_here():
    def architectures(names):
        return {MODELS[name].config["architectures"][0] for name in names}

    assert architectures(NAMES + OTHER_NAMES) == architectures(MODELS)


@pytest.mark.soak
@pytest.mark.few(1)
def test_a_first_call_without_parameters_samples_as_published(llm, name, prompt):
    (output,) = llm.generate(prompt)[0].outputs
    assert output.finish_reason == "length"
    assert len(output.token_ids) == LENGTH - PROMPT
    assert all(0 <= token < vocabulary(name) for token in output.token_ids)
    published, params = MODELS[name].generation_config, llm.get_default_sampling_params()
    for field in ("temperature", "top_k", "top_p"):
        assert getattr(params, field) == published.get(field, getattr(SamplingParams(), field))


@pytest.mark.soak
@pytest.mark.few(2)
@pytest.mark.parametrize("is_greedy", [False, True], ids=["as published", "greedy"])
def test_the_same_twice_and_without_drafts(llm, name, prompt, is_greedy):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.seed, params.ignore_eos = 8, 11, True
    if is_greedy:
        params.max_tokens, params.temperature = 12, 0.0
    drafted, again = (llm.generate(prompt, params)[0].outputs[0] for _ in range(2))
    params.num_speculative_tokens = 0
    plain = llm.generate(prompt, params)[0].outputs[0]
    assert drafted.token_ids == again.token_ids == plain.token_ids
    assert len(plain.token_ids) == params.max_tokens
    assert plain.metrics.num_draft_tokens == 0 < again.metrics.num_draft_tokens
    if name not in HAVE_HEADS:
        assert again.metrics.num_accepted_tokens > 0
