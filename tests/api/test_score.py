"""Scores of given texts, against the one-request oracle."""

import numpy as np
import pytest
from harness import FIXTURES, prompts
from logprobs import NEAR, check_entry, exact

from jaxspec import LLM, SamplingParams
from jaxspec.api.score import TextScore
from jaxspec.requests.outputs import RequestOutput

FIXTURE = "qwen3_5"


@pytest.fixture(scope="module")
def llm():
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16]}
    with LLM(FIXTURES / FIXTURE, dtype="float32", max_model_len=64, **options) as llm:
        yield llm


def test_every_token_of_a_text_has_the_model_s_logprob(llm):
    texts = [*prompts(5, seed=2, longest=40), (7,)]
    scores = llm.score([{"prompt_token_ids": list(text)} for text in texts], logprobs=2)
    for text, scored in zip(texts, scores, strict=True):
        want = exact(FIXTURE, text)
        assert scored.token_ids == list(text) and scored.token_logprobs[0] is None
        for index in range(1, len(text)):
            check_entry(scored.logprobs[index], text[index], 2, want[index], f"token {index}")
        own = want[np.arange(len(text)), text]
        np.testing.assert_allclose(scored.token_logprobs[1:], own[1:], atol=NEAR)
        for start in (1, len(text) // 2, len(text)):
            assert abs(scored.total(start) - own[max(start, 1) :].sum()) < 40 * NEAR


def test_the_likeliest_ending_of_a_text_has_the_best_score(llm):
    prompt = list(prompts(1, seed=4)[0])
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (chosen,) = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
    endings = [chosen, (chosen + 1) % 256, (chosen + 2) % 256]
    scores = llm.score([{"prompt_token_ids": [*prompt, ending]} for ending in endings])
    totals = [scored.total(len(prompt)) for scored in scores]
    assert totals[0] == max(totals) < 0


@pytest.mark.parametrize(
    ("prompt", "logprobs", "message"),
    [
        (
            [1] * 64,
            0,
            "the prompt has 64 tokens, and the maximum context length is max_model_len=64",
        ),
        ([1], 21, "logprobs must be at most 20, got 21"),
        ([1], None, "logprobs must be an integer of at least 0, got None"),
        ([300], 0, "Token ids must be 0 to"),
    ],
)
def test_bad_calls_are_refused(llm, prompt, logprobs, message):
    with pytest.raises(ValueError, match=message):
        llm.score([{"prompt_token_ids": prompt}], logprobs)


def test_a_text_that_was_not_read_has_no_score():
    with pytest.raises(RuntimeError, match="Text 1 was aborted before it was read"):
        TextScore.of(1, RequestOutput(None, [1, 2], []))
