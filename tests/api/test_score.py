"""Scores of given texts, against the one-request oracle."""

import dataclasses

import numpy as np
import pytest
from harness import HYBRID, folder_of, prompts
from logprobs import NEAR, check_entry, exact

from jaxspec import LLM, SamplingParams
from jaxspec.api.score import TextScore
from jaxspec.requests.outputs import RequestOutput

FIXTURE = HYBRID


@pytest.fixture(scope="module")
def llm():
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16]}
    with LLM(folder_of(FIXTURE), dtype="float32", max_model_len=64, **options) as llm:
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


@pytest.mark.soak
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


def test_with_a_temperature_they_are_of_the_distribution_that_tokens_are_drawn_from(llm):
    texts = prompts(3, seed=6, longest=40)
    given = [{"prompt_token_ids": list(text)} for text in texts]
    scores = llm.score(given, logprobs=3, temperature=0.7, top_k=30)
    raw = llm.score(given, temperature=0.7, top_k=30, logprobs_mode="raw_logprobs")
    plain = llm.score(given)
    assert [each.token_logprobs for each in raw] == [each.token_logprobs for each in plain]
    for text, scored in zip(texts, scores, strict=True):
        want = exact(FIXTURE, text) / 0.7
        want[want < -np.sort(-want, axis=1)[:, 29:30]] = -np.inf
        want -= np.log(np.exp(want).sum(axis=1, keepdims=True))
        own = want[np.arange(len(text)), text]
        np.testing.assert_allclose(scored.token_logprobs[1:], own[1:], atol=2 * NEAR)


@pytest.mark.soak
def test_they_are_the_processed_logprobs_of_generated_tokens(llm):
    params = SamplingParams(
        temperature=0.8, top_p=0.9, seed=2, max_tokens=20, logprobs=0, ignore_eos=True
    )
    params.logprobs_mode = "processed_logprobs"
    (output,) = llm.generate([{"prompt_token_ids": [5, 7, 9]}], params)
    sample = output.outputs[0]
    text = [*output.prompt_token_ids, *sample.token_ids]
    (scored,) = llm.score([{"prompt_token_ids": text}], temperature=0.8, top_p=0.9)
    found = scored.token_logprobs[3:]
    np.testing.assert_allclose(found, sample.token_logprobs, atol=2e-5)
    (raw,) = llm.score([{"prompt_token_ids": text}])
    assert np.abs(np.subtract(raw.token_logprobs[3:], found)).max() > 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"logprobs_mode": "raw"},
        {"logprobs_mode": None},
    ],
    ids=str,
)
def test_scores_of_what_is_never_drawn_are_refused(llm, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        llm.score([{"prompt_token_ids": [1, 2]}], **wrong)


@pytest.mark.soak
def test_an_engine_may_report_processed_logprobs_by_default():
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16]}
    options |= {"logprobs_mode": "processed_logprobs", "dtype": "float32", "max_model_len": 64}
    params = SamplingParams(temperature=0.7, top_k=1, max_tokens=4, logprobs=0, seed=1)
    raw = dataclasses.replace(params, logprobs_mode="raw_logprobs")
    with LLM(folder_of(FIXTURE), **options) as llm:
        found = llm.generate([{"prompt_token_ids": [3, 4]}] * 2, [params, raw])
    assert params.logprobs_mode is None
    assert not found[0].outputs[0].token_logprobs.any()
    assert (found[1].outputs[0].token_logprobs < -0.01).all()


def test_a_text_that_was_not_read_has_no_score():
    with pytest.raises(RuntimeError, match="Text 1 was aborted before it was read"):
        TextScore.of(1, RequestOutput(None, [1, 2], []))
