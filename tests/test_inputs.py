"""Prompts and parameters in, samples out: what is taken, and what is refused before any is made."""

import itertools
import time

import numpy as np
import pytest
from tokenizer_folders import BYTES

from jaxspec import inputs
from jaxspec.inputs import InputProcessor, params_of, prompts_of
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer

SHORT = SamplingParams(max_tokens=4)
IDS = {"prompt_token_ids": [1, 2, 3]}


def processor(max_model_len=64, **changes):
    options = {"tokenizer": Tokenizer(BYTES), "vocab_size": 264, "eos_ids": [258], "seed": 0}
    return InputProcessor(
        **options | changes, max_model_len=max_model_len, request_key=lambda prompt, seed: 0
    )


def prompt_of(prompt, params=SHORT):
    ((sample,),) = processor().process([prompt], [params])
    return sample.request.prompt


@pytest.mark.parametrize(
    "prompt",
    [
        "abc",
        {"prompt": "abc"},
        {"prompt_token_ids": [97, 98, 99]},
        {"prompt_token_ids": (97, 98, 99)},
        {"prompt_token_ids": range(97, 100)},
        {"prompt_token_ids": np.array([97, 98, 99])},
        {"prompt_token_ids": np.array([97, 98, 99], np.uint8)},
        {"prompt_token_ids": [np.int64(97), 98, np.int8(99)]},
        {"prompt_token_ids": (i for i in (97, 98, 99))},
    ],
)
def test_a_prompt_is_a_text_or_ids_in_any_order_that_lasts(prompt):
    assert prompt_of(prompt) == (97, 98, 99)
    assert set(map(type, prompt_of({"prompt_token_ids": np.array([97])}))) == {int}


@pytest.mark.parametrize(
    "prompt",
    [None, 3, b"abc", ["abc"], [1, 2], {}, {"text": "abc"}, {"prompt": b"abc"}, {"prompt": None}]
    + [{**IDS, "prompt": "abc"}, {**IDS, "images": []}, {3: 4}, np.arange(3)],
)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="A prompt must be a text or a dict with .*, got "):
        prompt_of(prompt)


@pytest.mark.parametrize(
    "ids",
    [3, None, "abc", b"abc", {1, 2}, {1: 2}, [True], [1.0], ["a"], [[1]], [None]]
    + [np.array(3), np.ones((2, 2), int), np.array([True]), np.array([1.0])],
)
def test_what_is_no_list_of_ids_is_refused(ids):
    with pytest.raises(ValueError, match="prompt_token_ids must be a list of integers, got "):
        prompt_of({"prompt_token_ids": ids})


@pytest.mark.parametrize("wrong", [-1, 264, 10**400, 10**5000], ids=["-1", "264", "400", "5000"])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    with pytest.raises(ValueError, match="Token ids must be 0 to 263 .* the prompt has") as caught:
        prompt_of({"prompt_token_ids": [1, wrong]})
    assert len(str(caught.value)) < 300
    with pytest.raises(ValueError, match="stop_token_ids has"):
        prompt_of("a", SamplingParams(max_tokens=4, stop_token_ids=[wrong]))


def test_no_more_ids_are_read_than_could_fit():
    for ids, count in (
        (itertools.count(), "more than 64"),
        (range(10**12), "1000000000000"),
        ([1] * 65, "65"),
    ):
        with pytest.raises(ValueError, match=f"must fit max_model_len=64, got {count} token ids"):
            prompt_of({"prompt_token_ids": ids})


def test_a_prompt_and_its_max_tokens_fit_or_no_sample_is_made(monkeypatch):
    assert len(processor().process([IDS], [SamplingParams(max_tokens=61)])) == 1
    monkeypatch.setattr(inputs, "Request", None)
    for max_tokens in (62, 2**63 - 1):
        with pytest.raises(ValueError) as caught:
            processor().process([IDS], [SamplingParams(max_tokens=max_tokens, n=16_384)])
        assert str(caught.value) == (
            f"A prompt and its max_tokens must fit max_model_len=64: 3 + {max_tokens} tokens came. "
            "Shorten one, or raise max_model_len."
        )


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    started = time.perf_counter()
    with pytest.raises(ValueError, match="max_model_len=64, and a text of 100,000,000 bytes can't"):
        prompt_of("a" * 10**8)
    assert time.perf_counter() - started < 5
    long = [{"role": "user", "content": "a" * 10**6}]
    with pytest.raises(ValueError, match="max_model_len=64, and a text of 1,000,0.. bytes can't"):
        processor().chat(long, {})


def test_a_call_has_at_most_so_many_samples_and_prompt_tokens():
    many = [SamplingParams(n=16_384, max_tokens=4)] * 17
    with pytest.raises(ValueError, match="at most 262,144 samples, got 278,528. Lower n, or make"):
        processor().process([IDS] * 17, many)
    long = {"prompt_token_ids": [1] * 20_000}
    with pytest.raises(ValueError, match="at most 268,435,456 prompt tokens .* got 327,680,000"):
        processor(30_000).process([long], many[:1])


def test_a_chat_is_the_prompt_of_its_template():
    messages, options = [{"role": "user", "content": "a"}], {"enable_thinking": False}
    ids = Tokenizer(BYTES).chat(messages, **options)
    assert processor().chat(messages, options) == {"prompt_token_ids": ids}
    with pytest.raises(ValueError, match="no tokenizer.json, which chats need"):
        processor(tokenizer=None).chat([], {})


def test_the_prompts_of_a_call_are_one_or_several_in_order():
    assert prompts_of("ab") == ["ab"] and prompts_of(IDS) == [IDS]
    assert prompts_of(["a", IDS]) == prompts_of(iter(["a", IDS])) == ["a", IDS]
    for wrong in (None, 3, b"ab", {"a", "b"}):
        with pytest.raises(ValueError, match="prompts must be a text, a dict .*, got "):
            prompts_of(wrong)
    with pytest.raises(ValueError, match="at most 262,144 prompts, got more"):
        prompts_of(itertools.repeat("a"))


@pytest.mark.parametrize("params", [{"n": 2}, iter([SHORT]), {SHORT}, "a", 3, [SHORT, None], [3]])
def test_what_are_no_parameters_is_refused(params):
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams, one or a list"):
        params_of(params, 1)


def test_numpy_seeds_draw_as_pythons_do():
    def seeds(seed):
        (samples,) = processor().process([IDS], [SamplingParams(n=3, seed=seed, max_tokens=4)])
        return [sample.request.seed for sample in samples]

    assert (
        seeds(7) == seeds(np.int64(7)) == seeds(np.uint8(7)) == [3472058233, 3613949756, 1698743925]
    )
