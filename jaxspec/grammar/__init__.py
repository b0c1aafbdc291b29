"""Grammars of requests: the tokens that may follow, at each position and after each draft."""

from jaxspec.grammar.grammar import Grammar
from jaxspec.grammar.matchers import Matchers
from jaxspec.grammar.matching import Matcher, fill_masks
from jaxspec.grammar.token_filter import TokenFilter

__all__ = ["Grammar", "Matcher", "Matchers", "TokenFilter", "fill_masks"]
