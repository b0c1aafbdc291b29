"""Regular: the regex of a grammar that the device follows without the host."""

import re
from typing import NamedTuple

from jaxspec.grammar import lark
from jaxspec.grammar.json_schema import blanks, closed_if_asked
from jaxspec.grammar.regular_schema import regex_of
from jaxspec.grammar.thinking import Thinking
from jaxspec.requests.structured_outputs import StructuredOutputsParams


class Regular(NamedTuple):
    """A regular language of answers, after reasoning that one token ends."""

    regex: str
    thinking_end: int | None = None  # None if the answer begins at once

    @staticmethod
    def of(form: StructuredOutputsParams, thinking: Thinking | None) -> "Regular | None":
        """Return the language of a form; None if it is not regular, or its reasoning is not."""
        regex = _regex(form)
        if regex is None or thinking is None:
            return None if regex is None else Regular(regex)
        if not thinking.is_open or thinking.budget is not None or len(thinking.ends) != 1:
            return None
        return Regular(regex, thinking.ends[0])


def _regex(form: StructuredOutputsParams) -> str | None:
    if form.regex is not None:
        return lark.terminal(form.regex)
    if form.choice is not None:
        return "|".join(map(re.escape, form.choice))
    if isinstance(form.json, dict):
        return regex_of(closed_if_asked(form, form.json), _blank(form))
    return None


def _blank(form: StructuredOutputsParams) -> str:
    """Return the regex of the blanks between two JSON tokens, which may be none."""
    if form.disable_any_whitespace:
        return ""
    return f"(?:{form.whitespace_pattern or blanks(form.max_whitespace)})?"
