"""A template's signs tell the dialect; a prompt's end tells whether the reasoning is open."""

import pytest

from jaxspec.text.parsers import PLAIN
from jaxspec.text.parsers.dialects import (
    HERMES,
    LFM2,
    LLAMA,
    NEMOTRON_NANO_2,
    REASONING_PARSERS,
    TOOL_PARSERS,
    XML,
    parser_for,
    starts_in_reasoning,
)

TEMPLATES = {
    "<tool_call>\\n<function=example_function_name>\\n<parameter=a>": XML,
    '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}': HERMES,
    "{{ '<|tool_list_start|>' }}": LFM2,
    "<|tool_call_start|>": LFM2,
    "<TOOLCALL>[": NEMOTRON_NANO_2,
    '{{- "<|python_tag|>" }}': LLAMA,
    "{{ message['content'] }}": PLAIN,
    "": PLAIN,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_tells_the_dialect(template):
    assert parser_for(template) == TEMPLATES[template]
    thinking = parser_for(template + "</think>")
    assert thinking.thinks and thinking.readers == TEMPLATES[template].readers
    assert "</think>" in thinking.tags


def test_without_a_template_all_is_content():
    assert parser_for(None) == PLAIN


def test_the_vocabulary_decides_for_a_template_without_an_example():
    lists = "List of tools: {{ tools | tojson }}"
    assert parser_for(lists) == PLAIN
    assert parser_for(lists, {"<|tool_call_start|>"}.__contains__) == LFM2
    assert parser_for(lists, {"<tool_call>"}.__contains__) == XML
    assert parser_for("{{ messages }}", {"<tool_call>"}.__contains__) == PLAIN


def test_names_of_parsers_decide_in_place_of_the_template():
    for name, dialect in TOOL_PARSERS.items():
        assert parser_for("<TOOLCALL>", tool_parser=name) == dialect
    for name in REASONING_PARSERS:
        assert parser_for(None, reasoning_parser=name).thinks
    assert parser_for("</think>", tool_parser="hermes").thinks


@pytest.mark.parametrize(
    "prompt, is_open",
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\nSo far", True),
        ("<|im_start|>assistant\n<think>\nSo far</think>\n\nHi", False),
        ("[INST] what is <think> [/INST]", False),
    ],
)
def test_where_a_prompt_ends(prompt, is_open):
    assert starts_in_reasoning(prompt) == is_open
