"""A deterministic engine at published vocabularies: the same bits alone, in a batch and as read."""

import pytest
from real_models import make_llm, write_small

from jaxspec import SamplingParams

PROMPTS = [
    {"prompt_token_ids": [*range(1000, 1000 + length), *range(1000, 1020)]} for length in (20, 45)
]
OPTIMIZED = True  # otherwise each iteration of a loop copies all states
SIZES = {"max_num_seqs": 2, "decode_buckets": [2], "max_model_len": 128}
REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0),
    SamplingParams(seed=3, top_k=50, top_p=0.9, max_tokens=8, ignore_eos=True, logprobs=0),
]


def told(output):
    """The ids of an output and their logprobs."""
    [sample] = output.outputs
    pairs = zip(sample.logprobs, sample.token_ids, strict=True)
    return sample.token_ids, [entry[token].logprob for entry, token in pairs]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "gpt-oss-20b"])
def test_tokens_have_the_same_bits_alone_in_a_batch_and_as_read(name, tmp_path):
    folder, drafts = write_small(name, tmp_path), {"method": "ngram", "num_speculative_tokens": 3}
    options = {"speculative_config": drafts, "skip_tokenizer_init": True}
    with make_llm(folder, deterministic=True, **SIZES, **options) as llm:
        together = [told(output) for output in llm.generate(PROMPTS, REQUESTS)]
        pairs = zip(PROMPTS, REQUESTS, strict=True)
        assert [told(llm.generate(*pair)[0]) for pair in pairs] == together
        texts = [
            {"prompt_token_ids": prompt["prompt_token_ids"] + ids}
            for prompt, (ids, _) in zip(PROMPTS, together, strict=True)
        ]
        scores = llm.score(texts, logprobs_mode="raw_logprobs")
        assert [score.token_logprobs[-8:] for score in scores] == [each for _, each in together]
