"""Grammar: what a request's output must be, checked before it is queued."""

import dataclasses
import functools
import json
from typing import Any

from jaxspec.grammar import lark
from jaxspec.grammar.json_schema import schema_of
from jaxspec.grammar.library import library, limits, refused
from jaxspec.grammar.regular import Regular, limit_of
from jaxspec.grammar.structural_tags import tag_grammars
from jaxspec.grammar.thinking import Thinking, thinks
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.structured_outputs import StructuredOutputsParams
from jaxspec.text.tokenizer import Tokenizer

_CACHED = 64


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Grammar of a request's output, with its reasoning. Hashable, and the same in any process."""

    source: str | None  # llguidance's grammars as JSON; None allows any text
    thinking: Thinking | None = None  # None if the source has all of the reasoning
    regular: Regular | None = None  # None if the device alone cannot follow it

    @property
    def thinking_budget(self) -> int | None:
        return None if self.thinking is None else self.thinking.budget

    @staticmethod
    def of(
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt: str,
        reasoning_parser: str | None = None,
    ) -> "Grammar | None":
        """Return the grammar of the output after a prompt; None if any token may follow.

        Args:
            params: The request's parameters.
            tokenizer: The model's tokenizer.
            prompt: The prompt's text, of which the end tells whether the model is reasoning.
            reasoning_parser: A name of `REASONING_PARSERS`, for chat templates without `</think>`.

        Raises:
            ValueError: llguidance is not installed, or does not support the form or a part of it;
                or there is a limit for the reasoning of a model that does not reason.
        """
        form, budget = params.structured_outputs, params.thinking_token_budget
        if form is None and budget is None:
            return None
        can_think = thinks(tokenizer, reasoning_parser)
        if budget is not None and not can_think:
            raise ValueError(
                f"thinking_token_budget must be None with this model, got {budget}: its chat "
                "template has no </think>. Leave it out, or set the option reasoning_parser."
            )
        thinking = Thinking.of(tokenizer, prompt, budget) if can_think else None
        limited = None if budget is None else thinking
        if form is None:
            return None if limited is None else Grammar(None, limited, limit_of(limited))
        assert isinstance(form, StructuredOutputsParams)
        source = _source(_answer(form, tokenizer), thinking)
        if message := _error(source):
            raise refused(message, form.kind)
        apart = thinking if thinking and thinking.is_apart else limited
        return Grammar(source, apart, Regular.of(form, thinking))


def _source(answer: list[dict[str, Any]], thinking: Thinking | None) -> str:
    before = [] if thinking is None else [{"name": "output", "lark_grammar": thinking.rules}]
    return json.dumps({"grammars": [*before, *answer]})


def _answer(form: StructuredOutputsParams, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the grammars of an answer; the first is the whole, named `answer`."""
    first, *others = _grammars(form, tokenizer)
    return [first | {"name": "answer"}, *others]


def _grammars(form: StructuredOutputsParams, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if form.json is not None:
        return [{"json_schema": schema_of(form, _schema(form.json))}]
    if form.json_object:
        return [{"json_schema": schema_of(form, {"type": "object"})}]
    if form.regex is not None:
        return [lark.regex(form.regex)]
    if form.choice is not None:
        return [lark.choice(list(form.choice))]
    if form.grammar is not None:
        return [lark.grammar(form.grammar)]
    assert isinstance(form.structural_tag, dict)
    return tag_grammars(form.structural_tag, form, tokenizer)


def _schema(value: Any) -> dict[str, Any] | bool:
    assert isinstance(value, dict | bool)  # the parameters have read the text
    return value


@functools.lru_cache(_CACHED)
def _error(source: str) -> str:
    """Return what is wrong with a grammar; it takes about a millisecond, and no tokenizer."""
    matcher = library().LLMatcher
    is_error, messages = matcher.validate_grammar_with_warnings(source, limits=limits())
    return messages[0] if is_error else ""
