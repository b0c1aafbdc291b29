"""Answers: the message that came, whatever was printed of it, and its figures."""

import dataclasses

import pytest
from scripted_llm import ScriptedStream

from jaxspec import RequestMetrics, TextDelta
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.commands.conversation import Answer, Turn, by_draft, by_part, plain
from jaxspec.text.parsers import parser_for
from jaxspec.text.tokenizer import Tokenizer

THINKS = parser_for("a template with <think> and </think>")
BLOCK_COPIES = ["<thi", "nk>\nso\x1b[1m", "</think>", "\n\nYes", "."]


def answer(look, pieces=BLOCK_COPIES, prompt="", is_whole=True):
    stream = ScriptedStream(prompt, [1, 2, 3], pieces, "stop")
    made = Answer(stream, THINKS, look)
    deltas = stream._pieces if is_whole else stream._pieces[:-1]
    return made, "".join([made.push(delta) for delta in deltas])


@pytest.mark.parametrize("look", [plain, by_part()])
def test_reasoning_is_no_content_of_the_message(look):
    made, _ = answer(look)
    told = {"role": "assistant", "content": "Yes.", "reasoning_content": "so\x1b[1m"}
    assert made.message == told == made.message


def test_a_message_is_as_much_as_came():
    assert answer(plain, BLOCK_COPIES[:2], is_whole=False)[0].message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "so\x1b[1m",
    }
    assert answer(plain, ["half <"], is_whole=False)[0].message["content"] == "half <"
    assert answer(plain, [], is_whole=False)[0].message is None


def test_what_a_prompt_opened_goes_on():
    made, _ = answer(plain, ["so</think>", "Yes"], prompt="<think>\n")
    assert made.message["reasoning_content"] == "so" and made.message["content"] == "Yes"


def test_plain_text_is_as_the_model_wrote_it():
    assert answer(plain)[1] == "".join(BLOCK_COPIES)


def test_a_terminal_sees_reasoning_dim_and_no_control_characters():
    assert answer(by_part())[1] == "\x1b[2mso\N{SYMBOL FOR ESCAPE}[1m\x1b[0m\n\nYes."


def test_colours_are_those_of_who_gave_each_token():
    tokenizer = Tokenizer(EMBEDDED_MODEL)
    ids = tokenizer.encode("import os")
    shown = by_draft(tokenizer)
    positions = [0, *[2] * (len(ids) - 1)]
    text = shown(TextDelta("import os", ids, "stop", draft_positions=positions), [])
    assert "\x1b[38;5;16;48;5;153m" in text


def test_a_line_tells_the_stats():
    metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.25)
    turn = Turn(metrics, 4, 0.5, num_prompt_tokens=9, num_cached_tokens=8)
    line = "[4 tokens, 125.00 ms per token, no speculation, 250 ms to the first token, "
    assert str(turn) == line + "8 of 9 prompt tokens cached]"
    assert str(dataclasses.replace(turn, finish_reason="length")).endswith("cut at its length]")
    made, _ = answer(plain)
    assert (made.turn.num_tokens, made.turn.num_prompt_tokens) == (5, 3)
    assert made.turn.finish_reason == "stop" and made.legend == "target 5 (100%)"
