"""Each reader takes its kind and names the place of anything else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.server.translate import anthropic, responses
from jaxspec.server.translate.fields import (
    FieldError,
    content,
    items,
    mapping,
    named,
    objects,
    one_of,
    text,
)


def test_right_values_pass():
    assert text("a", "x") == "a" and mapping({"a": 1}, "x") == {"a": 1}
    assert items(["a"], "x") == [("x.0", "a")] and objects([{}], "x") == [("x.0", {})]
    assert named({"a": 1, "b": None, "c": 2}, ("a", "b")) == {"a": 1}
    assert one_of({"type": "t"}, "x", ("t",)) == {"type": "t"}


@pytest.mark.parametrize("read", [text, mapping, items, objects])
def test_an_error_names_the_place_and_what_came(read):
    with pytest.raises(FieldError, match=r"^a\.0 must be .*, got 5\. ") as told:
        read(5, "a.0")
    assert told.value.param == "a.0"


def test_a_content_is_a_text_or_parts():
    def part(told):
        return {"type": "text", "text": told}

    assert content("a", "x", ("text",)) == content([part("a")], "x", ("text",)) == "a"
    assert content(None, "x", ()) == content([], "x", ()) == ""
    assert content([part("a") | {"cache_control": {}}, part("b")], "x", ("text",)) == [
        part("a"),
        part("b"),
    ]
    with pytest.raises(FieldError, match=r"x\.1\.type must be one of text, got 'image'"):
        content([part("a"), {"type": "image"}], "x", ("text",))
    with pytest.raises(FieldError, match=r"x\.0\.text must be a text, got None"):
        content([{"type": "text"}], "x", ("text",))


NAMES = (
    *("messages", "input", "content", "role", "type", "text", "system", "tools", "tool_choice"),
    *("name", "input_schema", "tool_use_id", "thinking", "id", "arguments", "call_id", "output"),
    *("summary", "reasoning", "format", "output_config", "instructions", "chat_template_kwargs"),
)
WORDS = (
    *("user", "assistant", "system", "text", "tool_use", "tool_result", "thinking", "enabled"),
    *("message", "function_call", "function_call_output", "reasoning", "input_text", "function"),
    *("tool", "auto", "json_schema", "custom", "reasoning_text", "summary_text", ""),
)
VALUES = st.recursive(
    st.sampled_from([*WORDS, None, True, 0, 1.5]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=25,
)


@pytest.mark.parametrize("module", [anthropic, responses])
@given(body=st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_body_is_translated_or_refused(module, body):
    try:
        request = module.chat_request(body)
    except FieldError as error:
        assert error.param.split(".")[0] in NAMES and len(str(error)) < 500
    else:
        assert all(isinstance(message["role"], str) for message in request["messages"])
        json.dumps(request)
