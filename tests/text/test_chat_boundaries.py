"""Where the next turn of a chat parts: never behind the place that is given, whatever it says."""

import json

import pytest
from chat_templates import DROPS_THINKING, KEEPS_ALL, ONE_MESSAGE, PLAIN, words_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_folders import BYTES, folder_with, sentencepiece_folder

from jaxspec.text import chat_boundaries, template_process
from jaxspec.text.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "add", "description": "adds"}}
HI = {"role": "user", "content": "Hi there."}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """One tokenizer, whose chats name the template; it splits texts into words, and composes."""
    return Tokenizer(words_folder(tmp_path_factory.mktemp("words"), DROPS_THINKING))


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """One that has a token for each byte, and no words."""
    folder = folder_with(tmp_path_factory.mktemp("bytes"), chat_template_jinja=DROPS_THINKING)
    return Tokenizer(folder)


def found(tokenizer, messages, **options):
    """The texts in front of the boundaries of a conversation."""
    prompt = tokenizer.chat_prompt(messages, finds_boundaries=True, **options)
    assert prompt[:2] == (
        tokenizer.render_chat(messages, **options),
        tokenizer.chat(messages, **options),
    )
    return [tokenizer.decode(prompt.ids[:n], skip_special_tokens=False) for n in prompt.boundaries]


def test_a_prompt_stays_up_to_the_message_that_will_be_written_otherwise(letters, words):
    """What is thought goes from the answer, so behind "assistant\\n" a prompt goes on otherwise.

    The last words of what stays may come out as other tokens.
    """
    user = "<|im_start|>user\nHi there.<|im_end|>\n"
    assert found(letters, [HI]) == [user + "<|im_start|>"]
    assert found(words, [HI]) == [user + "<|im_start|>"]
    (whole,) = found(letters, [HI], chat_template=KEEPS_ALL)
    assert whole == user + "<|im_start|>"


def test_with_tools_there_is_a_place_where_a_result_comes_and_one_where_the_user_speaks(words):
    call = {"role": "assistant", "content": "", "reasoning_content": "Let me add."}
    call["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    loop = [HI, call, {"role": "tool", "content": "3"}]
    whole = words.render_chat(loop, tools=[TOOL])
    until_user, until_tool = found(words, loop, tools=[TOOL])
    assert until_user == "<|im_start|>user\nHi there.<|im_end|>\n<|im_start|>"
    assert until_tool == whole.removesuffix("\n") and until_tool.endswith("<think>")
    assert found(words, loop) == [until_user, until_tool]  # a result says that there are tools
    assert found(words, loop[:2], add_generation_prompt=False)[0] == until_user
    plain = [HI, {"role": "assistant", "content": "Hello."}]
    assert len(found(words, plain, add_generation_prompt=False, tools=[TOOL])) == 1


def test_a_message_that_is_continued_may_stay_whole_or_go(words):
    thought = "<think>\nHm"
    options = {"continue_final_message": True, "add_generation_prompt": False}
    half = [HI, {"role": "assistant", "content": "Half of an answer", "reasoning_content": "Hm"}]
    kept = "<|im_start|>user\nHi there.<|im_end|>\n<|im_start|>"
    assert found(words, half, **options) == [kept]
    (stays,) = found(words, half, chat_template=KEEPS_ALL, **options)
    assert stays == kept + "assistant\nHalf of"
    assert thought in words.render_chat(half, **options)


def test_a_template_without_added_tokens_stays_up_to_its_last_whole_word(words, tmp_path):
    assert found(words, [HI], chat_template=PLAIN) == ["user: Hi there.\n\n"]
    letters = Tokenizer(BYTES)  # all of a text is one word of it
    assert found(letters, [HI], chat_template=PLAIN) == []
    plain = Tokenizer(sentencepiece_folder(tmp_path))
    assert plain.chat_prompt([HI], finds_boundaries=True, chat_template=PLAIN).boundaries == ()


def test_a_template_that_takes_no_turn_gives_its_text_and_no_boundary(words, monkeypatch):
    assert found(words, [HI], chat_template=ONE_MESSAGE) == []
    assert found(words, [], chat_template="a") == []
    monkeypatch.setattr(template_process, "TURNS_TIME_LIMIT", 0.3)
    endless = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    slow = "{{ messages[0].content }}{% if messages | length > 1 %}" + endless + "{% endif %}"
    for _ in range(2):
        assert found(words, [HI], chat_template=slow) == []


def test_nothing_is_tried_unless_it_is_asked_for(words, monkeypatch):
    monkeypatch.setattr("jaxspec.text.chat_template.follow_ups", None)
    assert words.chat_prompt([HI]).boundaries == ()


def test_a_long_text_is_not_made_tokens_twice(words, monkeypatch):
    """Then the last added token counts, or nothing."""
    monkeypatch.setattr(chat_boundaries, "MAX_PART", 8)
    user = "<|im_start|>user\nHi there.<|im_end|>\n"
    assert found(words, [HI]) == [user + "<|im_start|>"]
    assert found(words, [HI], chat_template=PLAIN) == []


def test_a_token_that_may_become_a_longer_one_is_open(tmp_path):
    """As runs of line ends, which some tokenizers have tokens for."""
    folder = words_folder(tmp_path, KEEPS_ALL)
    settings = json.loads((folder / "tokenizer.json").read_text())
    line = settings["added_tokens"][-1]
    settings["added_tokens"] += [line | {"id": 2060 + n, "content": "\n" * n} for n in (1, 2, 3)]
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(folder)
    talk = [{"role": "user", "content": "Hi\n\n\n"}]
    until = "<|im_start|>user\nHi\n\n\n<|im_end|>\n<|im_start|>"
    assert found(tokenizer, talk) == [until]
    half = [*talk, {"role": "assistant", "content": "So\n"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    (stays,) = found(tokenizer, half, **options)
    assert stays == until + "assistant"
    (plain,) = found(tokenizer, talk, chat_template="{{ messages[0].content }}a\n")
    assert plain == "Hi\n\n\n"


def test_half_of_a_surrogate_pair_is_refused_as_ever(words):
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        words.chat_prompt([HI | {"content": "a\ud800"}], finds_boundaries=True)


# Letters of several bytes, marks that join the letter in front, runs of spaces and lines, what
# looks like a token of the template, and the beginnings of such.
BLOCK_COPIES = ["a", "Hi", "12", "'s", "é", "e\u0301", "\u0301", "你", "🙂", "🙂\u200d", "각", "ㄱ"]
BLOCK_COPIES += ["<|im_end|>", "<|im_", "<think>", ".", "?!", "#", *" \n\t\u00a0", "  ", "\n\n"]
TEXT = st.lists(st.sampled_from(BLOCK_COPIES), max_size=6)
WORDS = TEXT.map("".join)
ANSWER = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": WORDS}, optional={"reasoning_content": WORDS}
)
CALL = ANSWER.map(
    lambda m: m | {"tool_calls": [{"type": "function", "function": {"name": m["content"]}}]}
)
USER = WORDS.map(lambda text: {"role": "user", "content": text})
RESULT = WORDS.map(lambda text: {"role": "tool", "content": text})
ROUND = st.one_of(st.tuples(USER, ANSWER), st.tuples(USER, CALL, RESULT, ANSWER))
SYSTEM = st.sampled_from([(), ({"role": "system", "content": "Be brief."},)])
ASKED = st.one_of(st.tuples(USER), st.tuples(USER, CALL, RESULT))
TEMPLATES = st.sampled_from([None, KEEPS_ALL, PLAIN])


@settings(max_examples=100)
@given(SYSTEM, st.lists(ROUND, max_size=2), ASKED, TEMPLATES, ANSWER, CALL, USER, RESULT)
def test_no_turn_parts_in_front_of_a_boundary(
    words, letters, system, rounds, asked, template, answer, call, user, result
):
    """The first boundary is for what the user says, all are for the result of a tool."""
    messages = [*system, *(message for one in rounds for message in one), *asked]
    for tokenizer in (words, letters):
        prompt = tokenizer.chat_prompt(
            messages, tools=[TOOL], finds_boundaries=True, chat_template=template
        )
        assert prompt.boundaries or template == PLAIN
        for index, end in enumerate(prompt.boundaries):
            turns = [[call, result], *([] if index else [[answer, user]])]
            for turn in turns:
                after = tokenizer.chat([*messages, *turn], chat_template=template)
                assert after[:end] == prompt.ids[:end]
