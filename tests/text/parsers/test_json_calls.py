"""Calls in JSON: every order of keys, and what is none."""

import pytest
from parsed import told

from jaxspec.text.parsers.dialects import HERMES, LLAMA

RIGHT = {
    '{"name": "f", "arguments": {"a": 1}}': {"a": 1},
    '{"arguments": {"a": "</tool_call>"}, "name": "f"}': {"a": "</tool_call>"},
    '{"id": [{}], "type": "function", "name": "f", "arguments": {}}': {},
    '{"name": "f", "parameters": {"a": {"b": [null]}}, "id": 1}': {"a": {"b": [None]}},
    '{"name": "f"}': {},
    '{"name": "f", "arguments": null}': {},
    '{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}': {"a": "\n"},
    '{"name": "f", "arguments": {"a": 1}': {"a": 1},  # a brace is missing
    ' \n{ "name"\t:"f" ,"arguments" : {"a":"x\ny"} }\n ': {"a": "x\ny"},
}
WRONG = [
    *(
        '{"name": 1, "arguments": {}}',
        '{"name": "a b", "arguments": {}}',
        '{"arguments": {}}',
        "[1]",
    ),
    *(
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "x"}',
        "{}",
        '{"name": "f" "a"}',
    ),
    *(
        '{"name": "f", "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        "f(1)",
    ),
    *('{"name": "f", "arguments": {"a": 1}, "arguments": {}}', '{"name": "f", "arguments": {]}'),
]


@pytest.mark.parametrize("call", RIGHT)
def test_a_call(call):
    text = f"<tool_call>{call}</tool_call>"
    assert told(HERMES, text) == ("", "", [("f", RIGHT[call])])


@pytest.mark.parametrize("call", WRONG)
def test_what_is_no_call_is_content(call):
    text = f"A\n<tool_call>{call}</tool_call>\nB"
    assert told(HERMES, text) == ("", text, [])


def test_a_call_behind_a_wrong_one_is_found():
    text = '<tool_call>{"name": }</tool_call>\n<tool_call>{"name": "f"}</tool_call>'
    assert told(HERMES, text) == ("", '<tool_call>{"name": }</tool_call>', [("f", {})])


def test_several_calls_between_one_pair_of_tags():
    text = '<tool_call>\n{"name": "f"}\n{"name": "get_time", "arguments": {"a": 1}}\n</tool_call>'
    assert told(HERMES, text) == ("", "", [("f", {}), ("get_time", {"a": 1})])
    data = '{"name": "Alice", "age": 3}'  # no tool
    assert told(HERMES, f'<tool_call>{{"name": "f"}}</tool_call>\n{data}') == (
        "",
        data,
        [("f", {})],
    )
    text = '<tool_call>{"name": "f"}{"a": 1}</tool_call>'
    assert told(HERMES, text) == ("", '{"a": 1}</tool_call>', [("f", {})])


def test_without_a_closing_tag_a_call_is_whole_at_its_brace():
    assert told(HERMES, '<tool_call>{"name": "f"}') == ("", "", [("f", {})])
    assert told(HERMES, '<tool_call>{"name": "f"}\nHi') == ("", "Hi", [("f", {})])


def test_llama_names_a_tool_and_its_parameters():
    call = '{"name": "get_time", "parameters": {"zone": "CET"}}'
    assert told(LLAMA, call) == ("", "", [("get_time", {"zone": "CET"})])
    assert told(LLAMA, f"<|python_tag|>{call}\n") == ("", "", [("get_time", {"zone": "CET"})])
    for text in ('{"name": "get_time"}', '{"name": "other", "parameters": {}}', f"Hi {call}"):
        assert told(LLAMA, text) == ("", text, [])
    code = '<|python_tag|>brave_search.call(query="x")'
    assert told(LLAMA, code) == ("", code, [])
