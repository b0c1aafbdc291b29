"""However a text is cut its parts are the same, nothing is lost, and time is linear."""

import json
import random
import time
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed import TOOLS, parse, told

from jaxspec.text.parsers import PLAIN, Dialect, assemble
from jaxspec.text.parsers.dialects import HERMES, LFM2, LLAMA, NEMOTRON_NANO_2, XML

XML_THINK, HERMES_THINK = XML._replace(thinks=True), HERMES._replace(thinks=True)
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich 🏔\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zü", "days": 3}}\n'
HERMES_CALL += "</tool_call>"
TIME = '{"name": "get_time", "parameters": {"a": "é"}}'


class Case(NamedTuple):
    dialect: Dialect
    text: str
    opened: bool = False  # the prompt has opened the reasoning
    reasoning: str = ""
    content: str = ""
    num_calls: int = 0


def same(dialect, text):
    return Case(dialect, text, content=text)


GOLDEN = {
    "opened by the prompt": Case(
        XML_THINK, "Hm.\n</think>\n\nHello\n\nworld\n", True, "Hm.", "Hello\n\nworld\n"
    ),
    "opened by the model": Case(
        XML_THINK, "<think>\nI <b>am</b>.\n</think>\n\nHi", False, "I <b>am</b>.", "Hi"
    ),
    "opened by both": Case(XML_THINK, "\n<think>\nHm\n</think>\n\nHi", True, "Hm", "Hi"),
    "never closed": Case(XML_THINK, "I think </thi", True, "I think </thi"),
    "spoken of": same(XML_THINK, "The tag <think> opens </think>."),
    "two calls": Case(
        XML_THINK, f"Hm\n</think>\n\nSo:\n\n{XML_CALL}\n{XML_CALL}\n", True, "Hm", "So:", 2
    ),
    "a call in the reasoning": Case(
        XML_THINK, f"Hm\n{XML_CALL}\n</think>\n\nDone", True, "Hm", "Done", 1
    ),
    "a call in the reasoning to no tool": Case(
        XML_THINK,
        "I could write <tool_call>\n<function=f>\n</function>.\n</think>\nHi",
        True,
        "I could write <tool_call>\n<function=f>\n</function>.",
        "Hi",
    ),
    "half a tag pair": Case(XML, XML_CALL.removeprefix("<tool_call>\n"), num_calls=1),
    "tags without a call": same(XML, "a <tool_call>\n<tool_call> b"),
    "a call cut off": same(XML, f"Hi\n\n{XML_CALL[:60]}"),
    "text behind a call": Case(XML, f"{XML_CALL}\n\nDone <br>.", content="Done <br>.", num_calls=1),
    "hermes": Case(
        HERMES_THINK, f"Hm</think>So\n{HERMES_CALL}\n{HERMES_CALL}", True, "Hm", "So", 2
    ),
    "hermes without JSON": same(HERMES, '<tool_call>{"name": x}</tool_call>'),
    "hermes cut off": same(HERMES, f"Hi\n{HERMES_CALL[:60]}"),
    "hermes gone wrong": same(
        HERMES, 'Hi\n<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>!'
    ),
    "hermes without its end": same(HERMES, f"Hi\n{HERMES_CALL[:-14]}"),
    "llama": Case(LLAMA, f"\n{TIME}; {TIME}", num_calls=2),
    "llama with a tag": Case(LLAMA, f"<|python_tag|>{TIME}", num_calls=1),
    "llama's JSON": same(LLAMA, '{"name": "Bob", "parameters": {}}'),
    "llama's prose": same(LLAMA, f"So: {TIME}"),
    "lfm2": Case(
        LFM2,
        'A\n<|tool_call_start|>[get_time(), get_time(a=[1, {"b": -2.5}])]<|tool_call_end|>B',
        content="A\nB",
        num_calls=2,
    ),
    "nemotron": Case(NEMOTRON_NANO_2, f"<TOOLCALL>[{TIME}]</TOOLCALL>", num_calls=1),
    "plain": same(PLAIN, f"<think>\n{XML_CALL}"),
}


@pytest.mark.parametrize("case", GOLDEN.values(), ids=GOLDEN)
def test_text_is_told_apart(case):
    reasoning, content, calls = told(case.dialect, case.text, reasoning=case.opened)
    assert (reasoning, content, len(calls)) == case[3:]


@pytest.mark.parametrize("case", GOLDEN.values(), ids=GOLDEN)
def test_every_cut_gives_the_same_pieces(case):
    text = case.text
    whole, parser = parse(case.dialect, text, reasoning=case.opened)
    cuts = [(text[:n], text[n:]) for n in range(len(text) + 1)]
    for parts in [*cuts, tuple(text)]:
        pieces, other = parse(case.dialect, *parts, reasoning=case.opened)
        assert pieces == whole
        assert (other.num_tool_calls, other.unfinished) == (
            parser.num_tool_calls,
            parser.unfinished,
        )


SCRAPS = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=get_weather>",
        "</function>",
    ),
    *(
        "<function=",
        "<parameter=city>",
        "<parameter=days>",
        "</parameter>",
        "\n",
        " ",
        "<",
        ">",
        "3",
    ),
    *(
        '{"name": "get_weather"',
        ', "arguments": ',
        '{"city": "',
        '"}',
        "}",
        "{",
        '"',
        "\\",
        ",",
        "é",
    ),
    *("<|tool_call_start|>", "[get_time(a=1)", "]", "<|tool_call_end|>", "<|python_tag|>", ";"),
    *('"parameters": {}', "<TOOLCALL>", "</TOOLCALL>", "text", "true", "1e5", "\\u00e", "[1, 2]"),
    *(XML_CALL, HERMES_CALL, '{"name": "get_time", "parameters": {"a": [1]}}'),
]
DIALECTS = (XML_THINK, HERMES_THINK, LLAMA, LFM2, NEMOTRON_NANO_2)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(SCRAPS), max_size=14),
    st.sampled_from(DIALECTS),
    st.booleans(),
    st.randoms(),
)
def test_any_text_in_any_pieces(scraps, dialect, reasoning, rng):
    text = "".join(scraps)
    whole, parser = parse(dialect, text, reasoning=reasoning)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(dialect, *parts, reasoning=reasoning)[0] == whole
    assert parse(dialect, *text, reasoning=reasoning)[0] == whole
    message = assemble(whole, parser.unfinished)
    assert len(message.tool_calls) == parser.num_tool_calls
    for call in message.tool_calls:
        assert isinstance(json.loads(call.arguments), dict) and call.name
    for index in parser.unfinished:
        told_of_it = "".join(
            p.text for p in whole if (p.kind, p.index) == ("tool_arguments", index)
        )
        with pytest.raises(ValueError):
            json.loads(told_of_it)
    assert_nothing_is_lost(text, message)


def assert_nothing_is_lost(text, message):
    """Without calls all but tags and space comes back, in order."""
    if not message.tool_calls:
        for tag in ("<think>", "</think>", "\n", " "):
            text = text.replace(tag, "")
            message = message._replace(
                reasoning=message.reasoning.replace(tag, ""),
                content=message.content.replace(tag, ""),
            )
        assert message.reasoning + message.content == text


UNITS = {
    "<": (XML_THINK, LFM2),
    "\n": (XML_THINK, LLAMA),
    "1": (HERMES_THINK, PLAIN),
    "{": (LLAMA,),
    "<tool_call>": (XML_THINK, HERMES_THINK),
    '<tool_call>{"': (XML_THINK, HERMES_THINK),
    "</think>": (XML_THINK,),
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n": (XML_THINK,),
    f"{XML_CALL[:70]}</parameter>\n": (XML_THINK,),
    XML_CALL: (XML_THINK,),
    HERMES_CALL: (HERMES_THINK,),
    "<|tool_call_start|>[": (LFM2,),
    '{"name": "get_time", "parameters": {}};': (LLAMA,),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("unit, dialect", [(u, d) for u, several in UNITS.items() for d in several])
def test_time_is_linear(unit, dialect):
    """At once and in small pieces; what copies the rest of a text again and again takes minutes."""
    text = unit * (2**20 // len(unit) if unit == "<" else 2**17 // len(unit))
    for reasoning in (False, True):
        before = time.perf_counter()
        parse(dialect, text, reasoning=reasoning)
        parse(dialect, *(text[n : n + 32] for n in range(0, len(text), 32)), reasoning=reasoning)
        assert time.perf_counter() - before < 10


def test_without_tools_calls_are_content():
    assert told(XML_THINK, XML_CALL, tools=()) == ("", XML_CALL, [])
    assert told(HERMES_THINK, f"<think>\nHm\n</think>\n\n{HERMES_CALL}", tools=()) == (
        "Hm",
        HERMES_CALL,
        [],
    )


def test_reasoning_that_was_opened_is_told_apart_without_a_dialect():
    assert told(PLAIN, "Hm\n</think>\n\nHi", reasoning=True) == ("Hm", "Hi", [])


def test_arguments_come_while_they_are_written():
    """Of a long text the parser holds back no more than a tag."""
    value = "".join(random.Random(0).choices("ab<>/\n", k=4000))
    for dialect, head in (
        (XML, "<tool_call>\n<function=get_weather>\n<parameter=city>\n"),
        (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "'),
    ):
        parser = dialect(starts_in_reasoning=False, tools=TOOLS)
        pieces = parser.push(head)
        assert [p.kind for p in pieces] == ["tool_name", "tool_arguments"]
        told_of_it = pieces[-1].text
        for n, char in enumerate(value):
            told_of_it += "".join(piece.text for piece in parser.push(char))
            assert len(json.loads(told_of_it + '"}')["city"]) >= n - 16


@pytest.mark.parametrize("dialect, call", [(XML, XML_CALL), (HERMES, HERMES_CALL)])
def test_an_unfinished_call_is_no_whole_json(dialect, call):
    """Wherever it is cut off, nobody can run it."""
    for text in (call[:n] for n in range(len(call))):
        pieces, parser = parse(dialect, text)
        if pieces and pieces[0].kind == "tool_name" and not parser.num_tool_calls:
            assert parser.unfinished == {0: text}
            with pytest.raises(ValueError):
                json.loads(pieces[-1].text)
