"""Tools by name, in OpenAI's form and in the flat one."""

import pytest

from jaxspec.text.parsers.calls import Tools, may_name

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
        {"name": "f", "parameters": SCHEMA},
    ],
)
def test_tools_have_schemas(tool):
    tools = Tools([tool])
    assert tools and tools.has("f") and tools.schema("f") == SCHEMA
    assert not tools.has("g") and tools.schema("g") == {}


def test_tools_without_names_are_none():
    assert not Tools([{}, {"function": "f"}, {"function": {"name": ["f"]}}, {"name": None}])
    assert Tools([{"name": "f", "parameters": "x"}]).schema("f") == {}


def test_names():
    tools = Tools([{"name": "odd name"}])
    assert may_name("odd name", tools, True) and not may_name("f", tools, True)
    assert may_name("a.b-c/d:e_1", tools, False)
    for name in ("", "a b", "<a>", "x" * 257):
        assert not may_name(name, tools, False)
