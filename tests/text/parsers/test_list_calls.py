"""Lists of calls, of Python's form and of JSON's."""

import pytest
from parsed import told

from jaxspec.text.parsers.dialects import LFM2, NEMOTRON_NANO_2
from jaxspec.text.parsers.literals import MAX_CHARACTERS


def lfm2(calls):
    return f"<|tool_call_start|>{calls}<|tool_call_end|>"


@pytest.mark.parametrize(
    "calls, arguments",
    [
        ('[f(a="x")]', {"a": "x"}),
        ("[f(a=-1, b=[True, None, (1.5,)])]", {"a": -1, "b": [True, None, [1.5]]}),
        ("f()", {}),
        ('[f(a={"b": {"c": true, "d": null}})]', {"a": {"b": {"c": True, "d": None}}}),
        ('[{"name": "f", "arguments": {"a": "é"}}]', {"a": "é"}),
        ('[f(a="\\d")]', {"a": "\\d"}),
        ("[f(a='x\ny\r\nz')]", {"a": "x\ny\r\nz"}),
        ("[f(a='ls \\\n -l', b=\"it's\n\")]", {"a": "ls \\\n -l", "b": "it's\n"}),
        (
            "[f(from=1, class='a', max-size=2, a='b(in=1)')]",
            {"from": 1, "class": "a", "max-size": 2, "a": "b(in=1)"},
        ),
        ('[{"name": "f", "arguments": {"a": "x\ny"}}]', {"a": "x\ny"}),
    ],
)
def test_a_call(calls, arguments):
    assert told(LFM2, lfm2(calls)) == ("", "", [("f", arguments)])


@pytest.mark.parametrize(
    "calls",
    [
        "",
        "[]",
        "[f(1)]",
        "[f(a=g())]",
        "[f(**{})]",
        "[f(a=x)]",
        "[f(a={1: 2})]",
        "[f(a=b'x')]",
        "[f(a=1, a=2)]",
        "[f(a={1})]",
        "[f(a=1e999)]",
        "[f()",
        "[f(); g()]",
        "(" * 5000,
        "[f(a=" + "[" * 150 + "]" * 150 + ")]",
        "[f(a='\0')]",
        "[f(a='\\ud800')]",
        "[f(a='''" + "\\a" * 50_000,
        "['" + "\\'" * 50_000,
        "[f(a=" + "'\"" * 50_000,
        "lambda: 0",
        '[{"name": 1}]',
        "[f(a=-'x')]",
        "[(lambda: 0)()]",
    ],
)
def test_what_is_no_call_is_content(calls):
    text = f"A {lfm2(calls)} B"
    if told(LFM2, text) != ("", text, []):
        assert calls.startswith("[f(a=[")  # deep lists depend on Python's version


def test_text_behind_a_list_is_content():
    assert told(LFM2, lfm2("[f()]") + "Checking.") == ("", "Checking.", [("f", {})])


def test_an_endless_list_is_content():
    text = "<|tool_call_start|>[f(a='" + "x" * (MAX_CHARACTERS + 10)
    assert told(LFM2, text) == ("", text, [])
    assert told(LFM2, text + "')]<|tool_call_end|>") == ("", text + "')]<|tool_call_end|>", [])


def test_nemotron_nano_2():
    text = '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</TOOLCALL>'
    assert told(NEMOTRON_NANO_2, text) == ("", "", [("f", {"a": 1}), ("g", {})])
