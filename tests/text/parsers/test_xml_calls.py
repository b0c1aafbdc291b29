"""Calls in tags: arguments by the tool's schema, any text inside them, and forgotten tags."""

import json
import time

import pytest
from parsed import parse, told

from jaxspec.text.parsers import assemble
from jaxspec.text.parsers.dialects import HERMES, XML


def call(*arguments, name="get_weather"):
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def arguments_of(text):
    reasoning, content, calls = told(XML, text)
    assert (reasoning, content, len(calls)) == ("", "", 1)
    return calls[0][1]


def test_arguments_follow_the_schema():
    text = call(
        ("city", "12"),
        ("days", "3"),
        ("celsius", "True"),
        ("places", '["a"]'),
        ("options", '{"a": 1}'),
        ("other", "5"),
    )
    expected = {"city": "12", "days": 3, "celsius": True, "places": ["a"], "options": {"a": 1}}
    assert arguments_of(text) == expected | {"other": "5"}


@pytest.mark.parametrize(
    "value",
    [
        "",
        "\n",
        "a\n\nb",
        " a ",
        "<parameter=city>",
        "</parameter>\nmore",
        "</function>",
        "</function>\nx",
        "<tool_call>\n<function=f>",
        "<think></think>",
        '"quoted" \\ \x01',
        "🏔é\u2028",
        "</parameter></parameter>x",
        "</parameter>\n<parameter=>",
        "<parameter=x>\n1\n</parameter>",
        "see\n<parameter=days>\n1\n</parameter>\nthere",
        "see\n<parameter=days>\n1\n</parameter>",
        "a <parameter=days>",
        "<div>\n</div>",
        "<parameters>\n</parameters>",
        "</paragraph>\n",
    ],
)
def test_strings_may_have_any_text(value):
    assert arguments_of(call(("city", value), ("days", "1"))) == {"city": value, "days": 1}


def test_what_the_schema_does_not_take_is_a_string():
    assert arguments_of(call(("days", "three"), ("options", "{'a': f()}"))) == {
        "days": "three",
        "options": "{'a': f()}",
    }


def test_pythons_spelling_and_a_bit():
    text = call(
        ("options", "{'a': [None, True, \"it's\"]}"), ("places", "['a\nb']"), ("celsius", "1")
    )
    expected = {"options": {"a": [None, True, "it's"]}, "places": ["a\nb"], "celsius": True}
    assert arguments_of(text) == expected


BOTH = call(("city", "Bern"), ("days", "1"))


@pytest.mark.parametrize(
    "tag, slip",
    [
        ("</parameter>", "</parameter>\n</parameter>"),
        ("</parameter>", "</parameter></parameter>\n</parameter>"),
        *(
            ("</parameter>", slip)
            for slip in ("</param>", "</paramter>", "</parameters>", "</parameter")
        ),
        ("</parameter>", "</parameter=city>"),
        ("</parameter>\n", ""),
        ("</function>", "</function>\n</function>"),
        *(("</function>", slip) for slip in ("</func>", "</functions>", "</function")),
        *(("</tool_call>", slip) for slip in ("</toolcall>", "</tool_calls>", "</tool_call")),
        ("</tool_call>", "</tool_call>\n</tool_call>"),
    ],
)
def test_closing_tags_that_are_doubled_missing_or_misspelt(tag, slip):
    text = BOTH.replace(tag, slip)
    assert text != BOTH
    for cut in (len(text), 1):
        parts = [text[i : i + cut] for i in range(0, len(text), cut)]
        pieces, parser = parse(XML, *parts)
        message = assemble(pieces, parser.unfinished)
        (found,) = message.tool_calls
        assert (message.content, json.loads(found.arguments)) == ("", {"city": "Bern", "days": 1})


def test_arguments_that_seemed_to_begin_are_text_with_all_their_tags():
    code = "see\n<parameter=days>\n<parameter=x>\n1\n</parameter>\n</parameter>"
    assert arguments_of(call(("city", code))) == {"city": code}


def test_what_no_text_can_hold_is_a_string():
    assert arguments_of(call(("places", "['\\ud800']"))) == {"places": "['\\ud800']"}


def test_many_openings_take_linear_time():
    openings = "".join(f"<parameter=p{i}>\n" for i in range(40_000))
    before = time.perf_counter()
    told(
        XML,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        + openings
        + "</parameter>\n</function>",
    )
    assert time.perf_counter() - before < 10


def test_json_between_the_tags_of_another_form():
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert told(XML, text) == told(HERMES, text) == ("", "", [("f", {"a": 1})])
    listed = '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>'
    assert told(XML, listed) == ("", "", [("f", {}), ("g", {})])
    assert told(HERMES, BOTH)[2] == [("get_weather", {"city": "Bern", "days": 1})]


def test_a_string_or_null():
    for value, read in (
        ("null", None),
        ("None", None),
        ("nul", "nul"),
        ("nullify", "nullify"),
        ("", ""),
    ):
        assert arguments_of(call(("note", value))) == {"note": read}


def test_forgotten_tags():
    text = call(("city", "Bern"))
    assert told(XML, text.removeprefix("<tool_call>\n"))[2] == [("get_weather", {"city": "Bern"})]
    for tag in ("\n</tool_call>", "</function>\n", "</parameter>\n"):
        assert arguments_of(text.replace(tag, "")) == {"city": "Bern"}
    # Without any tag around it only a tool's name makes it a call.
    text = "<function=print>\n</function>"
    assert told(XML, text) == ("", text, [])


def test_no_arguments():
    assert told(XML, call(name="get_time")) == ("", "", [("get_time", {})])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n<function=>\n</function>",
        "<tool_call> text",
        "<tool_call><function=a b></function></tool_call>",
        "<tool_call><function=f>text</function></tool_call>",
        "<tool_call><function=f></tool_call>",
        "<tool_call><function=f>\n<parameter=\n>",
        "<tool_call><function=f><parameter=a>\nb",
        "<tool_call><function=f><parameter=a>\nb</parameter>\n",
        "<tool_call>{}</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text):
    assert told(XML, text) == ("", text, [])
