"""Every field of `SamplingParams` at 248,320 ids: alone, all together, and in one batch."""

import dataclasses

import pytest
from real_models import make_llm, write_small
from walks import Walk, walk

from jaxspec import SamplingParams
from jaxspec.api.beam_search import BeamSearchParams
from jaxspec.requests.sampling_params import RequestOutputKind

NAME = "qwen3.5-0.8b"
OPTIMIZED = True  # a step of 248,320 ids takes longer without optimizations than compiling
VOCAB = 248_320
TOKENS = 4  # of an output
PROMPT = "while True"  # a token for each letter
LAST = ord(PROMPT[-1])  # greedy output repeats it with these weights


def tokens(output):
    return output.outputs[0].token_ids


def is_greedy(output):
    return tokens(output) == [LAST] * TOKENS


def has_no_repeats(output):
    return len({*tokens(output), LAST}) == TOKENS + 1


def is_sampled(output):
    return len(tokens(output)) == TOKENS and all(0 <= token < VOCAB for token in tokens(output))


# A value of each field, whether it draws, and what shows that it did what it says.
FIELDS = {
    "n": (2, False, lambda output: [len(o.token_ids) for o in output.outputs] == [TOKENS] * 2),
    "temperature": (0.7, True, is_sampled),
    "top_p": (0.9, True, is_sampled),
    "top_k": (20, True, is_sampled),
    "min_p": (0.2, True, is_sampled),
    "presence_penalty": (2.0, False, lambda output: len(set(tokens(output))) == TOKENS),
    "frequency_penalty": (2.0, False, lambda output: len(set(tokens(output))) == TOKENS),
    "repetition_penalty": (1e6, False, has_no_repeats),
    "logit_bias": ({VOCAB - 1: 1e3}, False, lambda o: tokens(o) == [VOCAB - 1] * TOKENS),
    "allowed_token_ids": ([3, 200_000], False, lambda o: set(tokens(o)) <= {3, 200_000}),
    "bad_words": (["e"], False, lambda output: LAST not in tokens(output)),
    "seed": (17, True, is_sampled),
    "max_tokens": (2, False, lambda output: tokens(output) == [LAST] * 2),
    "min_tokens": (3, False, is_greedy),
    "structured_outputs": (
        {"choice": ["ab", "a" * 9]},
        False,
        lambda o: o.outputs[0].text in ("ab", "a" * TOKENS),
    ),
    "extra_args": (
        {"modulus": 199_999, "offset": 150_000},
        False,
        lambda o: tokens(o) == walk(o.prompt_token_ids, TOKENS, 199_999, 150_000),
    ),
    "stop": ("ee", False, lambda o: (o.outputs[0].text, o.outputs[0].stop_reason) == ("", "ee")),
    "stop_token_ids": ([LAST], False, lambda output: tokens(output) == [LAST]),
    "include_stop_str_in_output": (True, False, is_greedy),
    "ignore_eos": (True, False, is_greedy),
    "detokenize": (False, False, lambda o: is_greedy(o) and o.outputs[0].text == ""),
    "skip_special_tokens": (False, False, is_greedy),
    "spaces_between_special_tokens": (False, False, is_greedy),
    "truncate_prompt_tokens": (8, False, lambda output: len(output.prompt_token_ids) == 8),
    "output_kind": (RequestOutputKind.CUMULATIVE, False, is_greedy),
    "num_speculative_tokens": (
        0,
        False,
        lambda o: is_greedy(o) and o.metrics.num_draft_tokens == 0,
    ),
    "logprobs": (3, False, lambda o: [len(place) for place in o.outputs[0].logprobs] == [3] * 4),
    "logprobs_mode": ("processed_logprobs", False, is_greedy),
    "routed_experts_prompt_start": (2, False, is_greedy),  # of a model without experts: nothing
    "prompt_logprobs": (2, False, lambda o: len(o.prompt_logprobs) == len(PROMPT)),
}
TOGETHER = {
    name: value
    for name, (value, _, _) in FIELDS.items()
    if name not in ("detokenize", "allowed_token_ids", "logit_bias", "stop_token_ids", "max_tokens")
    and name != "structured_outputs"  # which goes without min_tokens and ignore_eos
    and name != "extra_args"  # of which the processor forces ids
} | {"allowed_token_ids": list(range(0, VOCAB, 3)), "logit_bias": {9: 1.0}, "max_tokens": TOKENS}


def params_of(name):
    value, draws, _ = FIELDS[name]
    base = {"temperature": 1.0 if draws else 0.0, "max_tokens": TOKENS, "seed": 5}
    return SamplingParams(**base | {name: value})


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_small(NAME, tmp_path_factory.mktemp("qwen"), has_tokenizer=True)
    with make_llm(folder, max_model_len=128, logits_processors=[Walk()]) as made:
        yield made


@pytest.fixture(scope="module")
def together(llm):
    """First of all, so that later requests need no program for several kinds of them."""
    return [llm.generate(PROMPT, SamplingParams(**TOGETHER))[0] for _ in range(2)]


@pytest.fixture(scope="module")
def alone(llm, together):
    return {name: llm.generate(PROMPT, params_of(name))[0] for name in FIELDS}


def all_ids(output):
    return [sample.token_ids for sample in output.outputs]


def test_every_field_has_a_value():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert FIELDS.keys() == names - {"thinking_token_budget"}  # tests/grammar


@pytest.mark.soak
def test_each_field_alone(alone):
    """In one test: two processes of `pytest -n 2` would each compile for a part of the fields."""
    wrong = {name: tokens(alone[name]) for name in FIELDS if not FIELDS[name][2](alone[name])}
    assert wrong == {}


@pytest.mark.soak
def test_all_fields_together_give_the_same_twice(together):
    first, again = together
    assert all_ids(first) == all_ids(again)
    assert len(first.outputs) == 2 and first.outputs[0].logprobs and first.prompt_logprobs
    assert all(token % 3 == 0 for sample in all_ids(first) for token in sample)


@pytest.mark.soak
def test_kinds_mixed_in_a_batch_give_what_each_gives_alone(llm, alone):
    """And drafts change nothing of what any of them gives."""
    mixed = llm.generate([PROMPT] * len(FIELDS), [params_of(name) for name in FIELDS])
    assert [all_ids(output) for output in mixed] == [all_ids(alone[name]) for name in FIELDS]
    drawing = [name for name, (_, draws, _) in FIELDS.items() if draws]
    params = [params_of(name) for name in drawing]
    for each in params:
        each.num_speculative_tokens = 0
    plain = llm.generate([PROMPT] * len(params), params)
    assert [all_ids(output) for output in plain] == [all_ids(alone[name]) for name in drawing]


@pytest.mark.soak
def test_a_chat(llm, together):
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    first, again = (llm.chat([{"role": "user", "content": "Hi"}], params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert first.prompt.endswith("assistant\n") and first.outputs[0].text


@pytest.mark.soak
def test_a_prompt_that_came_before_is_read_from_the_cache(llm, together):
    """From the third time on: the second leaves the recurrent state where prompts part."""
    params, prompt = SamplingParams(temperature=0.0, max_tokens=TOKENS), "import os; " * 6
    outputs = [llm.generate(prompt, params)[0] for _ in range(3)]
    assert outputs[0].num_cached_tokens == 0 < outputs[2].num_cached_tokens
    assert tokens(outputs[0]) == tokens(outputs[1]) == tokens(outputs[2])


@pytest.mark.soak
def test_log_probabilities_agree_with_scores(llm, together):
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=3)
    output = llm.generate(PROMPT, params)[0]
    given = [
        place[token].logprob
        for token, place in zip(tokens(output), output.outputs[0].logprobs, strict=True)
    ]
    whole = {"prompt_token_ids": output.prompt_token_ids + tokens(output)}
    (score,) = llm.score(whole)
    assert score.token_logprobs[-TOKENS:] == pytest.approx(given, abs=1e-4)


@pytest.mark.soak
def test_beam_search_finds_no_less_likely_text_than_greedy(llm, together):
    (found,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2))
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=2, logprobs=1))[0]
    best, second = found.sequences
    assert best.cum_logprob >= second.cum_logprob
    assert best.cum_logprob >= greedy.outputs[0].cumulative_logprob - 1e-4
