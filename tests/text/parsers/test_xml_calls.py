"""Calls in tags: arguments by the tool's schema, any text inside them, and forgotten tags."""

import pytest
from parsed import told

from jaxspec.text.parsers.dialects import XML


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
        "</parameter>",
        "</parameter>\nmore",
        "</function>",
        "</function>\nx",
        "<tool_call>\n<function=f>",
        "<think></think>",
        '"quoted" \\ \x01',
        "🏔é\u2028",
        "</parameter></parameter>x",
        "</parameter>\n<parameter=>",
    ],
)
def test_strings_may_have_any_text(value):
    assert arguments_of(call(("city", value), ("days", "1"))) == {"city": value, "days": 1}


def test_what_the_schema_does_not_take_is_a_string():
    assert arguments_of(call(("days", "three"), ("options", "{'a': 1}"))) == {
        "days": "three",
        "options": "{'a': 1}",
    }


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
