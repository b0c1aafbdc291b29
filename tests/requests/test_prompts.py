"""What counts as one prompt and what as several, and what is read of token ids."""

import itertools

import numpy as np
import pytest

from jaxspec.requests.prompts import (
    PromptParts,
    TokenizedPrompt,
    is_one_prompt,
    parts_of,
    prompts_of,
    read_ids,
)

IDS = {"prompt_token_ids": [1, 2, 3]}


def test_the_prompts_of_a_call_are_one_or_several_in_order():
    assert prompts_of("ab") == ["ab"] and prompts_of(IDS) == [IDS]
    assert prompts_of(["a", IDS]) == prompts_of(iter(["a", IDS])) == ["a", IDS]
    assert prompts_of([[1, 2], [3]]) == [[1, 2], [3]] and prompts_of([]) == []
    for wrong in (None, 3, b"ab", {"a", "b"}):
        with pytest.raises(ValueError, match="prompts must be a text, token ids, .*, got "):
            prompts_of(wrong)
    with pytest.raises(ValueError, match="at most 262,144 prompts, got more"):
        prompts_of(itertools.repeat("a"))


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), range(1, 3), [np.int8(1), 2]])
def test_a_list_that_begins_with_an_integer_is_one_prompt(ids):
    (prompt,) = prompts_of(ids)
    assert read_ids(parts_of(prompt).token_ids, 9, None) == (1, 2) and is_one_prompt(ids)
    (prompt,) = prompts_of(iter(ids))
    assert read_ids(parts_of(prompt).token_ids, 9, None) == (1, 2)
    assert not is_one_prompt([ids]) and [list(each) for each in prompts_of([ids])] == [[1, 2]]


def test_one_prompt_is_told_from_a_list():
    assert all(map(is_one_prompt, ["", "a", {}, IDS]))
    assert not any(map(is_one_prompt, [[], ["a"], [IDS], iter("a"), None, 3]))


def test_a_dict_gives_its_text_with_its_ids():
    assert parts_of("a") == parts_of({"prompt": "a"}) == PromptParts("a")
    assert parts_of(IDS | {"prompt": "a"}) == PromptParts("a", [1, 2, 3])


@pytest.mark.parametrize("ends", [3, "12", [0], [-1], [1.5], [True], ["1"], {1: 2}, {1}])
def test_boundaries_are_counts_of_tokens(ends):
    with pytest.raises(ValueError, match="cache_boundaries must be a list of numbers of tokens, "):
        parts_of(IDS | {"cache_boundaries": ends})


def test_boundaries_are_few_and_go_with_ids():
    assert parts_of(IDS | {"cache_boundaries": (2, np.int32(9))}).cache_boundaries == (2, 9)
    assert parts_of(IDS | {"cache_boundaries": None}).cache_boundaries == ()
    with pytest.raises(ValueError, match="at most 16 cache_boundaries, got more. Leave out those"):
        parts_of(IDS | {"cache_boundaries": itertools.repeat(1)})
    with pytest.raises(ValueError, match="goes with prompt_token_ids, got .1.. Leave it out with"):
        parts_of({"prompt": "a", "cache_boundaries": [1]})


def test_no_more_ids_are_read_than_are_needed():
    for ids in (range(10**12), itertools.count()):
        with pytest.raises(ValueError, match="too long: it has .* max_model_len=9 tokens"):
            read_ids(ids, 9, None)
    assert read_ids(range(10**12), 9, 2) == (10**12 - 2, 10**12 - 1)
    assert read_ids(iter(range(99)), 9, 2) == (97, 98)
    with pytest.raises(ValueError, match="must be a list of integers, got 'abc'"):
        read_ids("abc", 9, 2)


def test_a_tokenized_prompt_is_one_prompt_and_truncated_with_its_boundaries():
    prompt = TokenizedPrompt(tuple(range(10)), "text", "salt", (3, 8))
    assert prompts_of(prompt) == [prompt] and prompts_of([prompt] * 2) == [prompt] * 2
    assert prompt.truncated(6) == TokenizedPrompt(tuple(range(4, 10)), "text", "salt", (4,))
    assert prompt.truncated(None) is prompt.truncated(10) is prompt.truncated(99) is prompt
