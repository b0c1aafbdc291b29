"""Matchers: creates the matchers of an engine's requests, with a cache of compiled grammars."""

import collections
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxspec.checks import shown
from jaxspec.grammar.automata import Automata
from jaxspec.grammar.automaton import Automaton
from jaxspec.grammar.free_text import AnyTokens, Thoughts
from jaxspec.grammar.grammar import Grammar
from jaxspec.grammar.library import is_installed, library, limits, refused
from jaxspec.grammar.matching import Matcher, Vocabulary
from jaxspec.grammar.thinking import tag_ids
from jaxspec.text.parsers.output_parser import THINK_ENDS
from jaxspec.text.tokenizer import Tokenizer

_CACHED = 128
"""Most compiled grammars kept for later requests."""
_CACHED_BYTES = 2**16


class Matchers:
    """Creates matchers for one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]):
        """Create a factory; `start` or the first grammar reads the tokenizer.

        Args:
            tokenizer: The model's tokenizer; None if it has none.
            vocab_size: Number of token ids of the model, of which the last may have no token.
            eos_ids: Ids that may follow a complete output.
        """
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._compiled = collections.OrderedDict[str, _Compiled]()
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._vocabulary: _Read | None = None
        self._any_tokens = AnyTokens(vocab_size)
        self._ids = _ids(tokenizer, vocab_size, self._eos_ids)
        self._automata = Automata(
            lambda: self._read().tokens, self._ids.bytes_of, vocab_size, self._eos_ids
        )

    def start(self) -> None:
        """Read the tokenizer in a thread, so that no request waits for it."""
        if self._tokenizer is not None and self._eos_ids and is_installed():
            threading.Thread(target=self._try_read, name="grammar vocabulary", daemon=True).start()

    def matcher(self, grammar: Grammar, output: Sequence[int] = ()) -> Matcher:
        """Return a new matcher after `output`.

        Args:
            grammar: The request's grammar.
            output: Output tokens so far, as of a migrated request.

        Raises:
            ValueError: the tokenizer is of a kind without grammars, or the grammar allows nothing.
        """
        source, thinking = grammar.source, grammar.thinking
        if source is None:
            found = Matcher(None, self._ids, thinking, self._any_tokens)
        else:
            is_apart = thinking is not None and thinking.is_apart
            thoughts = self._read().thoughts if is_apart else None
            found = Matcher(self._copy(source), self._ids, thinking, thoughts)
        found.advance(output)
        return found

    def automaton(self, grammar: Grammar, output: Sequence[int] = ()) -> Automaton | None:
        """Return the automaton with which the device follows a grammar; None if it cannot.

        Args:
            grammar: The request's grammar.
            output: Output tokens so far; if the automaton refuses one, a matcher has the error.

        Raises:
            ValueError: the tokenizer is of a kind without grammars.
        """
        found = None if grammar.regular is None else self._automata.of(grammar.regular)
        if found is None or found.position(output, grammar.thinking_budget).state < 0:
            return None
        return found

    def _copy(self, source: str) -> Any:
        with self._lock:
            compiled = self._compiled.setdefault(source, _Compiled())
            self._compiled.move_to_end(source)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        return compiled.copy(lambda: self._compile(source))

    def _compile(self, source: str) -> Any:
        matcher = library().LLMatcher(self._read().tokens, source, log_level=0, limits=limits())
        # The first mask visits states for the first time, which takes up to milliseconds.
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise refused(matcher.get_error())
        if not any(mask):
            raise refused("no text satisfies it")
        return matcher

    def _try_read(self) -> None:
        try:
            self._read()
        except ValueError:
            return  # requests with a grammar raise it

    def _read(self) -> "_Read":
        """Return what grammars need of the tokenizer, made once."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _make_vocabulary(self) -> "_Read":
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and this model has none.")
        if len(tokenizer) > self._vocab_size:
            raise ValueError(
                "structured_outputs need a tokenizer within the model's vocabulary of "
                f"{self._vocab_size:,} ids, got {len(tokenizer):,} tokens. Use the model's own."
            )
        make, end = library().LLTokenizer, self._ids.end
        if end is None:
            raise ValueError(
                "structured_outputs need an EOS token of the tokenizer, and none of the ids "
                f"{shown(self._eos_ids)} is one. Use the model's own tokenizer."
            )
        try:
            tokens = make(tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=[end])
        except Exception as error:  # of the library's own choice
            raise ValueError(
                "structured_outputs need a tokenizer whose tokens are bytes, such as byte-level "
                f"BPE or SentencePiece with byte fallback, got an error: {error!s:.200}."
            ) from error
        ends, thoughts = tag_ids(THINK_ENDS, tokenizer), None
        if len(ends) == 1:
            thoughts = Thoughts(tokenizer, self._vocab_size, ends[0], self._eos_ids)
        return _Read(tokens, thoughts)


class _Read(NamedTuple):
    """Forms of a tokenizer that grammars use; a large one takes seconds to convert."""

    tokens: Any  # llguidance's form of it
    thoughts: Thoughts | None  # None if `</think>` is no token


def _ids(tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    if tokenizer is None:
        return Vocabulary(vocab_size, lambda token: b"")
    special = {*tokenizer.special_tokens.values()}
    tokens = sorted(eos_ids, key=lambda token: (token not in special, token))  # special ones first
    end = next((token for token in tokens if token < len(tokenizer)), None)
    others = tuple(token for token in eos_ids if token != end)
    bytes_of = functools.lru_cache(maxsize=_CACHED_BYTES)(tokenizer.bytes_of)
    return Vocabulary(vocab_size, bytes_of, end, others)


class _Compiled:
    """A compiled grammar, or the place of one; requests for the same one wait for each other."""

    def __init__(self) -> None:
        self._lock, self._matcher = threading.Lock(), None

    def copy(self, compile: Callable[[], Any]) -> Any:
        with self._lock:
            if self._matcher is None:
                self._matcher = compile()
            return self._matcher.deep_copy()
