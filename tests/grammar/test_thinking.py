"""Reasoning before an answer: where it may be, and its limit, exactly at each place of drafts."""

import json

import numpy as np
import pytest
from constrained import (
    EOS,
    MARKS,
    VOCAB,
    Decoder,
    allowed,
    embedded,
    grammar_of,
    masks_of,
    matchers,
    thinking_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.grammar import Grammar, lark
from jaxspec.grammar.thinking import Reasoning, Thinking
from jaxspec.requests.sampling_params import SamplingParams

ANSWERS = ["yes", "no", "maybe"]
OPEN, CLOSED, NONE = "Q <think>\n", "Q <think>\n\n</think>\n\n", "Q"
CHAT = "<|user|>Q<|assistant|>"


@pytest.fixture(scope="module", params=[MARKS, ()], ids=["one token", "several tokens"])
def tokenizer(request, tmp_path_factory):
    return thinking_tokenizer(tmp_path_factory.mktemp("thinking"), marks=request.param)


def encoded(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def answer_of(text):
    return text.rpartition("</think>")[2].lstrip("\n")


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("prompt", [OPEN, NONE, CLOSED])
def test_the_answer_follows_the_reasoning(tokenizer, prompt, num_drafts):
    grammar = grammar_of({"choice": ANSWERS}, prompt=prompt, tokenizer=tokenizer, budget=6)
    thought = 0
    for seed in range(10):
        run = Decoder(grammar, seed=seed, num_drafts=num_drafts, tokenizer=tokenizer).run(60)
        assert run.is_finished and answer_of(run.text) in ANSWERS
        has_thought = "</think>" in run.text
        thought += has_thought
        assert run.text.count("</think>") == has_thought
        assert run.text.startswith("<think>") == (has_thought and prompt == NONE)
        assert not (prompt == CLOSED and has_thought) and not (prompt == OPEN and not has_thought)
    assert bool(thought) == (prompt != CLOSED) or prompt == NONE


def test_a_reasoning_parser_decides_in_place_of_the_template():
    """The embedded model's template has no `</think>`."""
    params = SamplingParams(structured_outputs={"choice": ANSWERS})
    plain, named = (Grammar.of(params, embedded(), OPEN, name) for name in (None, "qwen3"))
    assert plain is not None and plain.thinking is None
    assert "</think>" not in plain.source and "</think>" in named.source
    limited = SamplingParams(thinking_token_budget=3)
    with pytest.raises(ValueError, match="thinking_token_budget"):
        Grammar.of(limited, embedded(), OPEN)
    assert Grammar.of(limited, embedded(), OPEN, "qwen3").thinking.budget == 3


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_limit_is_exact_without_a_form(tokenizer, budget, num_drafts):
    grammar = grammar_of(None, prompt=OPEN, tokenizer=tokenizer, budget=budget)
    ends, numbers = encoded(tokenizer, "</think>"), set()
    for seed in range(8):
        run = Decoder(grammar, seed=seed, num_drafts=num_drafts, tokenizer=tokenizer, ends_at=0)
        run.run(30)
        if len(run.tokens) <= budget or "</think>" in tokenizer.decode(run.tokens[:budget], False):
            continue
        assert run.tokens[budget : budget + len(ends)] == ends
        numbers.add(len(run.tokens))
    assert numbers


def test_the_limit_with_a_form(tokenizer):
    """It is exact, except that a grammar of the whole text completes characters first."""
    grammar = grammar_of({"choice": ANSWERS}, prompt=OPEN, tokenizer=tokenizer, budget=4)
    ends = encoded(tokenizer, "</think>")
    late = 0 if len(ends) == 1 else 3  # a character has at most 3 bytes after its first
    for seed in range(12):
        run = Decoder(grammar, seed=seed, num_drafts=3, tokenizer=tokenizer).run(40)
        texts = [tokenizer.decode(run.tokens[:i], False) for i in range(len(run.tokens))]
        length = next(i for i, text in enumerate(texts) if "</think>" in text)
        assert length <= 4 + late + len(ends)
        assert not late or "\ufffd" not in run.text.partition("</think>")[0]


def test_masks_of_reasoning_are_those_of_a_grammar_of_the_whole_text(tmp_path):
    """Beside those within a character, which a grammar completes."""
    tokenizer = thinking_tokenizer(tmp_path / "one", marks=MARKS)
    form = {"choice": ANSWERS}
    grammar = grammar_of(form, prompt=OPEN, tokenizer=tokenizer)
    end = tokenizer.convert_tokens_to_ids("</think>")
    rules = f"start: THOUGHT <[{end}]> BLANK @answer\nBLANK: /\\n{{0,4}}/\n"
    rules += f"THOUGHT: {lark.text_without('</think>')}\n"
    answer = json.loads(grammar.source)["grammars"][1]
    whole = Grammar(json.dumps({"grammars": [{"lark_grammar": rules}, answer]}))
    fast, slow = (matchers(tokenizer).matcher(each) for each in (grammar, whole))
    texts = ["a <", "/", "th", "ink", " b</", "</", "think", "x</think", "\n</think>", "\n", "yes"]
    tails = [token for token in range(256) if tokenizer.bytes_of(token)[:1] > b"\x7f"]
    for token in (token for text in texts for token in encoded(tokenizer, text)):
        one, two = (set(allowed(masks_of(each)[0])) - set(tails) for each in (fast, slow))
        assert {t for t in one ^ two if tokenizer.bytes_of(int(t)).isascii()} == set()
        for each in (fast, slow):
            each.advance([token])
    assert fast.is_accepting and slow.is_accepting


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_places_across_the_end_are_those_of_the_states_there(tokenizer, num_drafts):
    grammar = grammar_of({"json_object": True}, prompt=OPEN, tokenizer=tokenizer)
    text = 'so </think>\n{"a": [1, 2]}'
    tokens = encoded(tokenizer, text)
    for start in range(len(tokens)):
        matcher = matchers(tokenizer).matcher(grammar, tokens[:start])
        drafts = tokens[start : start + num_drafts]
        masks = masks_of(matcher, drafts)
        for place in range(1 + len(drafts)):
            other = matchers(tokenizer).matcher(grammar, tokens[: start + place])
            np.testing.assert_array_equal(masks[place], masks_of(other)[0])
        np.testing.assert_array_equal(masks_of(matcher), masks[:1])


@pytest.mark.parametrize("wrong", ["<think>", "<|endoftext|>"])
def test_special_tokens_in_reasoning_are_errors(wrong, tmp_path):
    tokenizer = thinking_tokenizer(tmp_path / "one", marks=MARKS)
    grammar = grammar_of({"choice": ANSWERS}, prompt=OPEN, tokenizer=tokenizer)
    matcher = matchers(tokenizer).matcher(grammar)
    matcher.advance([tokenizer.convert_tokens_to_ids(wrong)])
    assert matcher.is_error and not masks_of(matcher).any()


def test_the_end_of_reasoning_inside_the_drafts(tokenizer):
    """Places before the end are free, those after it have the form."""
    grammar = grammar_of({"choice": ANSWERS}, prompt=OPEN, tokenizer=tokenizer)
    matcher = matchers(tokenizer).matcher(grammar)
    (x,) = encoded(tokenizer, "x")
    ends, (y,) = encoded(tokenizer, "</think>"), encoded(tokenizer, "y")
    masks = masks_of(matcher, [x, *ends, y])
    assert x in allowed(masks[0]) and x in allowed(masks[1])
    after = allowed(masks[1 + len(ends)])
    first = {tokenizer.decode([token])[0] for token in after}
    assert first <= {"y", "n", "m", "\n"} and y in after
    assert not {*EOS} & {*np.concatenate([allowed(mask) for mask in masks])}


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_the_limit_inside_the_drafts(tokenizer, num_before):
    """Only `</think>` is allowed at the place of the limit, and any token before and after it."""
    grammar = grammar_of(None, prompt=OPEN, tokenizer=tokenizer, budget=3)
    (x,) = encoded(tokenizer, "x")
    ends = encoded(tokenizer, "</think>")
    matcher = matchers(tokenizer).matcher(grammar, [x] * num_before)
    rest = [x] * (3 - num_before)
    masks = masks_of(matcher, [*rest, *ends, x])
    for place in range(len(rest)):
        assert len(allowed(masks[place])) == VOCAB
    for place, token in enumerate(ends, len(rest)):
        assert allowed(masks[place]).tolist() == [token]
    assert len(allowed(masks[-1])) == len(allowed(masks[-2])) == VOCAB


def test_special_tokens_and_a_spelled_out_end_are_no_thoughts(tmp_path):
    """The text's parser would take them for the end of the reasoning."""
    tokenizer = thinking_tokenizer(tmp_path / "one", marks=MARKS)
    grammar = grammar_of({"choice": ANSWERS}, prompt=OPEN, tokenizer=tokenizer)
    spelled = encoded(embedded(), "</think>")
    matcher = matchers(tokenizer).matcher(grammar, spelled[:-1])
    ids = allowed(masks_of(matcher)[0])
    assert spelled[-1] not in ids and not {*EOS} & {*ids}
    marks = {tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
    assert marks & {*ids} == {tokenizer.convert_tokens_to_ids("</think>")}


def is_ascii(token, tokenizer):
    text = tokenizer.bytes_of(token)
    return bool(text) and text.isascii()


@pytest.mark.parametrize("budget", [None, 0, 1, 5])
@pytest.mark.parametrize("prompt", [OPEN, CHAT])
def test_an_automaton_has_the_masks_of_a_matcher(tmp_path, prompt, budget):
    """Where the matcher knows the text that must follow, the automaton allows more tokens."""
    tokenizer = thinking_tokenizer(tmp_path / "one", marks=MARKS)
    grammar = grammar_of({"choice": ANSWERS}, prompt=prompt, tokenizer=tokenizer, budget=budget)
    automaton = matchers(tokenizer).automaton(grammar)
    start, end = map(tokenizer.convert_tokens_to_ids, MARKS[:2])
    num_ended = num_thoughts = 0
    for seed in range(30):
        random, matcher, tokens = (
            np.random.default_rng(seed),
            matchers(tokenizer).matcher(grammar),
            [],
        )
        while not {*EOS} & {*tokens} and len(tokens) < 30:
            host = set(allowed(masks_of(matcher)[0]).tolist())
            state = automaton.position(tokens, budget).state
            device = set(allowed(automaton.mask(state)).tolist())
            texts = {token for token in host ^ device if is_ascii(token, tokenizer)}
            if end in host or len(device) > 100:
                num_thoughts += 1
                assert not texts
            assert host <= device | {token for token in host if not is_ascii(token, tokenizer)}
            likely = [token for token in (start, end, *EOS) if token in host]
            pool = likely if likely and random.random() < 0.4 else sorted(host)
            pool = [each for each in pool if each in likely or is_ascii(each, tokenizer)]
            tokens.append(int(random.choice(pool)))
            matcher.advance(tokens[-1:])
        num_ended += tokens[-1] in EOS
        assert automaton.position(tokens, budget).state >= 0
    assert num_ended > 20 and num_thoughts


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_an_automaton_of_a_limit_alone_has_the_masks_of_a_matcher(tmp_path, budget):
    tokenizer = thinking_tokenizer(tmp_path / "one", marks=MARKS)
    grammar = grammar_of(None, prompt=OPEN, tokenizer=tokenizer, budget=budget)
    automaton = matchers(tokenizer).automaton(grammar)
    parts = [*encoded(tokenizer, "</think>x"), *encoded(embedded(), "</think>"), *EOS, VOCAB - 1]
    ended = 0
    for seed in range(40):
        random, matcher, tokens = (
            np.random.default_rng(seed),
            matchers(tokenizer).matcher(grammar),
            [],
        )
        for _ in range(12):
            state = automaton.position(tokens, budget).state
            mask = masks_of(matcher)[0]
            np.testing.assert_array_equal(automaton.mask(state), mask)
            ids = allowed(mask)
            ended += len(ids) == 1
            pool = [token for token in parts if token in ids] if random.random() < 0.7 else ids
            tokens.append(int(random.choice(pool)))
            matcher.advance(tokens[-1:])
    assert ended


def test_an_answer_that_may_begin_with_a_newline_is_of_the_host_after_optional_reasoning(tmp_path):
    tokenizer = thinking_tokenizer(tmp_path / "one", marks=MARKS)
    for prompt, is_regular in ((CHAT, False), (OPEN, True)):
        grammar = grammar_of({"regex": "\\s?x"}, prompt=prompt, tokenizer=tokenizer)
        assert (matchers(tokenizer).automaton(grammar) is not None) == is_regular


def test_a_limit_needs_a_model_that_thinks():
    with pytest.raises(ValueError, match="thinking_token_budget"):
        grammar_of(None, prompt=OPEN, budget=3)
    assert grammar_of({"choice": ANSWERS}, prompt=OPEN).thinking is None


def test_nothing_is_limited_after_a_closed_thought(tokenizer):
    assert grammar_of(None, prompt=CLOSED, tokenizer=tokenizer, budget=3) is None
    assert grammar_of(None, prompt=OPEN, tokenizer=tokenizer) is None


@settings(max_examples=200)
@given(
    texts=st.lists(st.sampled_from(["<", "/", "think", ">", "x", "<think>", "</think>", "</th"])),
    budget=st.integers(0, 4),
    is_open=st.booleans(),
)
def test_states_agree_with_a_search_of_the_whole_text(texts, budget, is_open):
    thinking = Thinking(is_open, (0,), (1, 2, 3), budget)
    state = Reasoning.start(thinking)
    for number in range(len(texts)):
        state = state.after(number, thinking, lambda token: texts[token].encode())
        text = "".join(texts[: number + 1])
        thought = text if is_open else text.removeprefix("<think>")
        is_inside = (is_open or text.startswith("<think>")) and "</think>" not in thought
        assert (state.phase == "inside") == is_inside
        if not is_inside:
            assert state.forced(thinking) is None
