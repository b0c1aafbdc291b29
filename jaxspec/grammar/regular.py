"""Regular: the regex of a grammar that the device follows without the host."""

import functools
import json
import re
from typing import NamedTuple

from jaxspec.grammar import lark
from jaxspec.grammar.automaton import MAX_BUDGET
from jaxspec.grammar.json_schema import blanks, closed_if_asked
from jaxspec.grammar.regular_schema import regex_of
from jaxspec.grammar.thinking import Thinking
from jaxspec.requests.structured_outputs import StructuredOutputsParams

_CACHED = 128


class Regular(NamedTuple):
    """A regular language of answers, after reasoning that one token ends.

    Grammars that differ only in the limit of the reasoning share one: the limit is a count of the
    row.
    """

    regex: str | None  # None allows any text
    thinking_end: int | None = None  # None if the answer begins at once
    thinking_start: int | None = None  # None if the prompt opens the reasoning

    @staticmethod
    def of(form: StructuredOutputsParams, thinking: Thinking | None) -> "Regular | None":
        """Return the language of a form; None if it is not regular, or its reasoning is not."""
        regex = _regex(form)
        if regex is None or thinking is None:
            return None if regex is None else Regular(regex)
        if len(thinking.ends) != 1 or not _has_moderate_budget(thinking):
            return None
        if thinking.is_open:
            return Regular(regex, thinking.ends[0])
        return (
            Regular(regex, thinking.ends[0], *thinking.opens) if len(thinking.opens) == 1 else None
        )


def limit_of(thinking: Thinking) -> Regular | None:
    """Return the language of limited reasoning and any text; None if only the host follows it."""
    is_known = thinking.is_open and len(thinking.ends) == 1
    return Regular(None, *thinking.ends) if is_known and _has_moderate_budget(thinking) else None


def _has_moderate_budget(thinking: Thinking) -> bool:
    return (thinking.budget or 0) <= MAX_BUDGET


def _regex(form: StructuredOutputsParams) -> str | None:
    if form.regex is not None:
        return lark.terminal(form.regex)
    if form.choice is not None:
        return "|".join(map(re.escape, form.choice))
    if isinstance(form.json, dict):
        return _regex_of_schema(json.dumps(closed_if_asked(form, form.json)), _blank(form))
    return None


@functools.lru_cache(_CACHED)
def _regex_of_schema(schema: str, blank: str) -> str | None:
    return regex_of(json.loads(schema), blank)


def _blank(form: StructuredOutputsParams) -> str:
    """Return the regex of the blanks between two JSON tokens, which may be none."""
    if form.disable_any_whitespace:
        return ""
    return f"(?:{form.whitespace_pattern or blanks(form.max_whitespace)})?"
