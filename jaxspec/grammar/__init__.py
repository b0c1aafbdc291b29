"""Grammars of requests: the tokens that may follow, at each position and after each draft."""

from jaxspec.grammar.grammar import Grammar
from jaxspec.grammar.matchers import Matchers
from jaxspec.grammar.matching import Matcher, fill_masks

__all__ = ["Grammar", "Matcher", "Matchers", "fill_masks"]
