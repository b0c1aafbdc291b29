"""Prompts and parameters in, samples out: what is taken, and what is refused before any is made."""

import dataclasses
import itertools
import pickle
import time

import numpy as np
import pytest
from tokenizer_folders import BYTES

from jaxspec.api import inputs
from jaxspec.api.inputs import InputProcessor
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.requests.prompts import TokenizedPrompt, params_of
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

SHORT = SamplingParams(max_tokens=4)
IDS = {"prompt_token_ids": [1, 2, 3]}


def processor(max_model_len=64, **changes):
    options = {"tokenizer": Tokenizer(BYTES), "vocab_size": 264, "eos_ids": [258], "seed": 0}
    return InputProcessor(**options | changes, max_model_len=max_model_len)


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
        {"prompt_token_ids": [97, 98, 99], "prompt": "another text, handed through"},
        [97, 98, 99],
        np.array([97, 98, 99]),
        range(97, 100),
    ],
)
def test_a_prompt_is_a_text_or_ids_in_any_order_that_lasts(prompt):
    assert prompt_of(prompt) == (97, 98, 99)
    assert set(map(type, prompt_of({"prompt_token_ids": np.array([97])}))) == {int}


@pytest.mark.parametrize(
    "prompt",
    [None, 3, b"abc", ["abc"], [1.5], {}, {"prompt": b"abc"}, {"prompt": None}]
    + [{"prompt_token_ids": None}, {**IDS, "prompt": 3}, np.array(3), {3}],
)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="A prompt must be a text, a list of token ids, .*, got "):
        prompt_of(prompt)


@pytest.mark.parametrize("key", ["text", "multi_modal_data", "mm_processor_kwargs", 3])
def test_a_key_that_no_prompt_has_is_refused_by_name(key):
    with pytest.raises(ValueError, match=f"got the key {key!r}, which jaxspec does not take"):
        prompt_of({**IDS, key: {"image": 1}})


def test_each_prompt_keeps_its_own_salt():
    salts = ["a", "\ud800", None]
    batch = [{**IDS, "cache_salt": salt} for salt in salts]
    groups = processor().process(batch, [SamplingParams(n=2)] * 3)
    assert [[each.request.cache_salt for each in group] for group in groups] == [
        [salt] * 2 for salt in salts
    ]


def boundaries_of(*given, params=SHORT, ids=(1, 2, 3, 4)):
    prompt = {"prompt_token_ids": ids, "cache_boundaries": list(given)}
    ((sample,),) = processor().process([prompt], [params])
    return sample.request.cache_boundaries


def test_a_prompt_keeps_where_others_will_part_from_it():
    assert boundaries_of() == () and boundaries_of(2, np.int64(4), 1) == (2, 4, 1)
    last_two = SamplingParams(max_tokens=4, truncate_prompt_tokens=2)
    assert boundaries_of(1, 2, 3, 4, params=last_two) == (1, 2)
    assert boundaries_of(3, ids=iter([1, 2, 3])) == (3,)
    with pytest.raises(ValueError, match="lie in the prompt, which has 4 tokens, got 5. Count the"):
        boundaries_of(2, 5)


@pytest.mark.parametrize("salt", ["", b"a", 3, ["a"]])
def test_a_salt_that_is_no_text_is_refused(salt):
    with pytest.raises(ValueError, match="cache_salt must be a text of at least one character"):
        prompt_of({**IDS, "cache_salt": salt})


@pytest.mark.parametrize(
    "ids",
    [3, "abc", b"abc", {1, 2}, {1: 2}, [True], [1.0], ["a"], [[1]], [None]]
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
        with pytest.raises(ValueError, match=f"it has {count} token ids.* max_model_len=64"):
            prompt_of({"prompt_token_ids": ids})


def requests_of(prompts, *params):
    groups = processor().process(prompts, params_of(list(params) * len(prompts), len(prompts)))
    return [group[0].request for group in groups]


@pytest.mark.parametrize(("asked", "length"), [(4, 7), (61, 64), (62, 64), (2**63 - 1, 64)])
def test_an_output_is_as_long_as_was_asked_for_or_fits(asked, length):
    """max_model_len is 64, and 3 tokens of it are the prompt's."""
    (request,) = requests_of([IDS], SamplingParams(max_tokens=asked))
    assert request.max_len == length
    (request,) = requests_of([IDS], SamplingParams(max_tokens=None))
    assert request.max_len == 64


def test_a_prompt_without_room_for_a_token_is_named_and_no_sample_is_made(monkeypatch):
    monkeypatch.setattr(inputs, "Request", None)
    long = [1] * 64
    for prompts, name in (([long], "the prompt"), ([IDS, "ab", long], "prompt 3 of 3")):
        with pytest.raises(ValueError) as caught:
            processor().process(prompts, [SamplingParams(n=16)] * len(prompts))
        assert f"too long: {name} has 64 tokens" in str(caught.value)
        assert "max_model_len=64" in str(caught.value)
    for wrong in ([1] * 65, "a" * 10**6, "\ud800", 3, {"prompt": 3}, {"prompt_token_ids": [1.5]}):
        with pytest.raises(ValueError, match="^In prompt 2 of 2: "):
            processor().process([IDS, wrong], [SHORT] * 2)


def test_truncation_keeps_the_last_tokens():
    text = "abcdefghijklmnopqrstuvwxyz" * 50
    for prompt in (text, list(text.encode()), {"prompt_token_ids": iter(text.encode())}):
        kept = prompt_of(prompt, SamplingParams(max_tokens=4, truncate_prompt_tokens=3))
        assert kept == tuple(b"xyz")
    for max_tokens, room in ((4, 4), (None, 1), (64, 1), (128, 1), (63, 63)):
        params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=-1)
        assert prompt_of(text, params) == tuple(text.encode()[-(64 - room) :])
    assert prompt_of("abc", SamplingParams(truncate_prompt_tokens=9)) == tuple(b"abc")
    with pytest.raises(ValueError, match="the prompt has 64 tokens.* max_model_len=64"):
        prompt_of(text, SamplingParams(truncate_prompt_tokens=64))


def test_priorities_are_integers_one_for_all_or_one_each():
    prompts = ["a", "b"]

    def priorities(priority):
        groups = processor().process(prompts, [SHORT] * 2, priority=priority)
        return [group[0].request.priority for group in groups]

    assert priorities(None) == [0, 0] and priorities(-3) == [-3, -3]
    assert priorities([2, 1]) == priorities(np.array([2, 1])) == [2, 1]
    for wrong in ([1], [1, 2, 3], "ab", 1.5):
        with pytest.raises(ValueError, match="priority must be an integer, or a list of 2"):
            priorities(wrong)
    with pytest.raises(ValueError, match="Each of priority must be an integer of at least"):
        priorities([1, True])


def test_what_text_a_sample_makes_follows_its_parameters():
    def text(ids, **fields):
        ((sample,),) = processor().process(["a"], [SamplingParams(**fields)])
        sample.request.tokens += ids
        sample.read()
        return sample.text

    ids = [*b"abc", 258, *b"d"]
    assert text(ids) == "abcd" and text(ids, detokenize=False) == ""
    assert text(ids, skip_special_tokens=False) == f"abc{Tokenizer(BYTES).decode([258], False)}d"
    ends = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert text(ids, **ends) == text(ids, skip_special_tokens=False)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    started = time.perf_counter()
    with pytest.raises(ValueError, match="too long: it has 100,000,000 bytes"):
        prompt_of("a" * 10**8)
    assert time.perf_counter() - started < 5
    long = [{"role": "user", "content": "a" * 10**6}]
    with pytest.raises(ValueError, match="too long: it has 1,000,0.. bytes"):
        processor().chats(long, {})


def test_a_call_has_at_most_so_many_samples_and_prompt_tokens():
    many = [SamplingParams(n=16_384, max_tokens=4)] * 17
    with pytest.raises(ValueError, match="at most 262,144 samples, got 278,528. Lower n, or make"):
        processor().process([IDS] * 17, many)
    long = {"prompt_token_ids": [1] * 20_000}
    with pytest.raises(ValueError, match="at most 268,435,456 prompt tokens .* got 327,680,000"):
        processor(30_000).process([long], many[:1])


def test_a_chat_is_the_prompt_of_its_template():
    messages, switches = [{"role": "user", "content": "a"}], {"enable_thinking": False}
    text = Tokenizer(BYTES).render_chat(messages, **switches)
    ids = Tokenizer(BYTES).chat(messages, **switches)
    want = TokenizedPrompt(tuple(ids), text)
    assert processor().chats(messages, {"chat_template_kwargs": switches}) == [want]
    pair = processor().chats([messages, messages], {"chat_template_kwargs": switches})
    assert pair == [want, want]
    with pytest.raises(ValueError, match="no tokenizer.json, which chats need"):
        processor(tokenizer=None).chats([], {})
    with pytest.raises(ValueError, match="^In conversation 2 of 2: Each of messages must be a map"):
        processor().chats([messages, [3]], {})
    with pytest.raises(TypeError, match="A chat has no argument 'tool'; the nearest is 'tools'"):
        processor().chats(messages, {"tool": []})
    (prompt,) = processor(finds_boundaries=True).chats(messages, {"chat_template_kwargs": switches})
    assert prompt == dataclasses.replace(want, cache_boundaries=(len(b"<user\na>\n<"),))


def test_the_engine_s_mode_of_logprobs_is_for_parameters_without_one():
    modes = [None, "raw_logprobs", "processed_logprobs"]
    params = [dataclasses.replace(SHORT, logprobs_mode=mode) for mode in modes]
    made = processor(logprobs_mode="processed_logprobs")
    for each in (made, made.twin()()):
        samples = each.process(["a"] * 3, params)
        found = [sample.request.params.logprobs_mode for (sample,) in samples]
        assert found == ["processed_logprobs", *modes[1:]]
    assert params[0].logprobs_mode is None
    assert processor().process_one("a")[0].request.params.logprobs_mode == "raw_logprobs"


def test_a_chat_s_ids_are_checked_once_by_whoever_made_them(monkeypatch):
    messages, short = [{"role": "user", "content": "abc"}], SamplingParams(truncate_prompt_tokens=2)
    with pytest.raises(ValueError, match="Token ids must be 0 to 9 .* the prompt has"):
        processor(vocab_size=10, eos_ids=[]).chats(messages, {})
    made = processor()
    prompt = made.chat(messages, {})
    for name in ("check_ids", "parts_of", "read_ids"):
        monkeypatch.setattr(inputs, name, None if name != "check_ids" else check_but_prompts)
    (sample,) = made.process_one(prompt)
    assert sample.request.prompt == prompt.token_ids and sample.prompt_text == prompt.text
    (sample,) = made.process_one([prompt], short)
    assert sample.request.prompt == prompt.token_ids[-2:]


def check_but_prompts(name, ids, vocab_size):
    assert "prompt" not in name


def test_a_call_of_one_prompt_takes_a_list_of_one():
    made = processor(default_params=SHORT)
    settled = dataclasses.replace(SHORT, logprobs_mode="raw_logprobs")
    for prompt in ([1, 2], {"prompt_token_ids": [1, 2]}, [[1, 2]]):
        (sample,) = made.process_one(prompt, request_id="a", priority=-1)
        assert sample.request.prompt == (1, 2) and sample.request.params == settled
        assert (sample.request_id, sample.request.priority) == ("a", -1)
    for prompts in ([[1], [2]], []):
        with pytest.raises(ValueError, match="A prefill is of one prompt"):
            made.process_one(prompts, call="prefill")
    with pytest.raises(ValueError, match="priority must be an integer"):
        made.process_one([1], priority=1.5)


def test_numpy_seeds_draw_as_pythons_do():
    def seeds(seed):
        (samples,) = processor().process([IDS], [SamplingParams(n=3, seed=seed, max_tokens=4)])
        return [sample.request.seed for sample in samples]

    assert (
        seeds(7) == seeds(np.int64(7)) == seeds(np.uint8(7)) == [3472058233, 3613949756, 1698743925]
    )


def test_a_twin_in_another_process_makes_the_same_samples_but_for_noise_of_its_own():
    def seeds(maker, params):
        return [group[0].request.seed for group in maker.process([IDS, IDS], [params] * 2)]

    own, (first, second) = processor(), [processor().twin(number) for number in (1, 2)]
    first, second = pickle.loads(pickle.dumps(first))(), second()
    seeded = SamplingParams(seed=7)
    assert seeds(own, seeded) == seeds(first, seeded) == seeds(second, seeded)
    drawn = [*seeds(own, SHORT), *seeds(first, SHORT), *seeds(second, SHORT)]
    assert len(set(drawn)) == 6
    (sample,), (twin,) = (each.process(["ab"], [SHORT])[0] for each in (own, first))
    assert sample.request.tokens == twin.request.tokens
    assert sample.request.stop_ids == twin.request.stop_ids


# Grammars


STRUCTURED = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, n=2)


@pytest.mark.parametrize("prompt", ["abc", IDS, TokenizedPrompt((1, 2), "abc")])
def test_all_samples_of_a_structured_prompt_have_its_grammar(prompt):
    (samples,) = processor().process([prompt], [STRUCTURED])
    one, two = (sample.request.grammar for sample in samples)
    assert one is not None and one == two
    ((plain,),) = processor().process([prompt], [SHORT])
    assert plain.request.grammar is None


def test_the_end_of_a_prompt_given_as_ids_tells_whether_the_model_is_reasoning():
    params = SamplingParams(thinking_token_budget=3)
    ids = processor().tokenizer.encode("Q <think>\n")
    for prompt in ("Q <think>\n", {"prompt_token_ids": ids}):
        ((sample,),) = processor().process([prompt], [params])
        assert sample.request.grammar.thinking.is_open
    ((sample,),) = processor().process(["Q <think>\n</think>\n"], [params])
    assert sample.request.grammar is None


def test_a_reasoning_parser_stands_for_a_template_that_shows_no_reasoning():
    options = {"tokenizer": Tokenizer(EMBEDDED_MODEL), "vocab_size": 2048, "eos_ids": [0]}
    params = SamplingParams(thinking_token_budget=3)
    with pytest.raises(ValueError, match="thinking_token_budget must be None"):
        processor(**options).process(["Q <think>\n"], [params])
    named = processor(**options, reasoning_parser="qwen3")
    for each in (named, named.twin()()):
        ((sample,),) = each.process(["Q <think>\n"], [params])
        assert sample.request.grammar.thinking.budget == 3


@pytest.mark.parametrize(
    ("changes", "name"), [({"tokenizer": None}, "tokenizer"), ({"eos_ids": []}, "EOS")]
)
def test_structured_outputs_need_a_tokenizer_and_an_end(changes, name, monkeypatch):
    made = processor(**changes)
    if "eos_ids" in changes:
        monkeypatch.setattr(made, "eos_ids", ())
    with pytest.raises(ValueError, match=name):
        made.process([IDS], [STRUCTURED])


def test_a_wrong_form_among_several_prompts_queues_none():
    wrong = SamplingParams(structured_outputs={"regex": "("})
    with pytest.raises(ValueError, match="regex"):
        processor().process(["a", "b"], [SHORT, wrong])
