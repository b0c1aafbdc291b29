"""Messages as clients send them, and as templates want them."""

import pytest

from jaxspec.server.generation.conversation import template_messages


def test_roles_contents_and_arguments_are_made_what_templates_know():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    found = template_messages(
        [
            {"role": "developer", "content": "be brief", "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ]
    )
    assert found[0] == {"role": "system", "content": "be brief"}
    assert found[1]["content"] == "" and found[1]["reasoning"] == "hm"
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": [1]}}
    assert found[2] == {"role": "tool", "content": "1", "tool_call_id": "c"}
    (without,) = template_messages([{"role": "assistant", "content": "x", "tool_calls": []}])
    assert without == {"role": "assistant", "content": "x"}


def test_arguments_may_be_missing_or_an_object_already_or_none():
    cut = '{"a": "x'
    for given, want in (
        (None, {}),
        ("", {}),
        ("null", {}),
        ({"a": 1}, {"a": 1}),
        (cut, {"arguments": cut}),
        ("[1]", {"arguments": "[1]"}),
        ("text", {"arguments": "text"}),
    ):
        call = {"function": {"name": "f", "arguments": given}}
        (found,) = template_messages([{"role": "assistant", "tool_calls": [call]}])
        assert found["tool_calls"][0]["function"]["arguments"] == want


@pytest.mark.parametrize(
    "message, said",
    [
        ({"content": "x"}, "messages.0.role must be a text such as 'user', got None"),
        ({"role": ""}, "messages.0.role must be"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages.0.tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls.0 must be"),
    ],
)
def test_a_message_that_no_template_could_write_is_refused(message, said):
    with pytest.raises(ValueError) as caught:
        template_messages([message])
    assert said in str(caught.value)
