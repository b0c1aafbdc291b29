"""Dialects of tool calls and reasoning, selected by the chat template of a model.

The formats are those of the published templates of Qwen3, Qwen3-Coder, Qwen3.5, Nemotron 3,
Nemotron Nano 2, Granite 4, LFM2 and Llama 3.1.
"""

import functools
from collections.abc import Callable

from jaxspec.text.parsers.json_calls import JsonCall
from jaxspec.text.parsers.list_calls import ListCalls
from jaxspec.text.parsers.output_parser import PLAIN, THINK, THINK_ENDS, Dialect
from jaxspec.text.parsers.xml_calls import CALL, CALL_ENDS, FUNCTION, TaggedCall, XmlCall

_THINK_TAGS = (THINK, THINK_ENDS)

XML = Dialect(
    "xml",
    {CALL: TaggedCall, FUNCTION: functools.partial(XmlCall, FUNCTION)},
    tags=(CALL, CALL_ENDS),
    call=(CALL, CALL_ENDS),
)
"""Qwen3.5, Qwen3-Coder, Nemotron 3."""
HERMES = Dialect("hermes", {CALL: TaggedCall}, tags=(CALL, CALL_ENDS), call=(CALL, CALL_ENDS))
"""Hermes, Qwen3, Granite 4 and many others."""
LLAMA = Dialect("llama", {tag: functools.partial(JsonCall, "") for tag in ("", "<|python_tag|>")})
"""Llama 3.1 and 3.2."""
LFM2 = Dialect(
    "lfm2",
    {"<|tool_call_start|>": functools.partial(ListCalls, "<|tool_call_end|>")},
    tags=("<|tool_call_start|>", "<|tool_call_end|>"),
)
NEMOTRON_NANO_2 = Dialect(
    "nemotron-nano-2",
    {"<TOOLCALL>": functools.partial(ListCalls, "</TOOLCALL>")},
    tags=("<TOOLCALL>", "</TOOLCALL>"),
)

# Strings that identify a dialect in a template's source, the more specific first.
_BY_SIGN = {
    "<TOOLCALL>": NEMOTRON_NANO_2,
    "<|tool_call_start|>": LFM2,
    "<|tool_list_start|>": LFM2,  # these templates copy earlier calls without writing call tags
    FUNCTION: XML,
    CALL: HERMES,
    "<|python_tag|>": LLAMA,
    '"parameters": dictionary of argument name': LLAMA,
}
# Tokens that identify a dialect in the vocabulary, for templates without a sign.
_BY_TOKEN = {"<TOOLCALL>": NEMOTRON_NANO_2, "<|tool_call_start|>": LFM2, CALL: XML}

TOOL_PARSERS = {
    **{dialect.name: dialect for dialect in (XML, HERMES, LLAMA, LFM2, NEMOTRON_NANO_2)},
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo"), XML),
    **dict.fromkeys(("llama3_json", "llama4_json"), LLAMA),
    "granite4": HERMES,
}
"""Dialects by their names and by those of vLLM's tool parsers."""
REASONING_PARSERS = ("deepseek_r1", "mimo", "nemotron_v3", "qwen3")
"""Names of vLLM's reasoning parsers for text between `<think>` and `</think>`."""


def parser_for(
    chat_template: str | None,
    has_token: Callable[[str], bool] = lambda text: False,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> Dialect:
    """Return the dialect of a model; call it to create the parser of a text.

    Args:
        chat_template: Source of the template; None for models without one, such as base models.
        has_token: Returns whether the vocabulary has a token. It decides for templates that list
            tools without an example of a call, such as LFM2.5's.
        tool_parser: A name of `TOOL_PARSERS`, which decides in place of the template.
        reasoning_parser: A name of `REASONING_PARSERS`, for templates without `</think>`.

    Returns:
        The dialect, or `PLAIN` if none is recognized; it also parses reasoning if the template has
        `</think>`.
    """
    source = chat_template or ""
    signs = (sign for sign in _BY_SIGN if sign in source)
    dialect = _BY_SIGN.get(next(signs, ""), PLAIN)
    if dialect is PLAIN and "tools" in source:
        tokens = (token for token in _BY_TOKEN if has_token(token))
        dialect = _BY_TOKEN.get(next(tokens, ""), PLAIN)
    if tool_parser is not None:
        dialect = TOOL_PARSERS[tool_parser]
    if THINK_ENDS not in source and reasoning_parser is None:
        return dialect
    return dialect._replace(thinks=True, tags=dialect.tags + _THINK_TAGS)


def starts_in_reasoning(prompt: str) -> bool:
    """Return whether a rendered prompt ends inside the model's reasoning.

    It does if it ends with `<think>` and whitespace, or with reasoning that the model continues:
    text after `<think>` without `</think>` or the mark of another turn, such as `<|im_start|>`.
    """
    _, tag, rest = prompt.rpartition(THINK)
    if not tag or not rest.strip():
        return bool(tag)
    return THINK_ENDS not in rest and "<|" not in rest and "<|" in prompt
