"""Automata: compiles the automata of an engine's requests, and caches them."""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.grammar.automaton import Automaton, AutomatonCompiler
from jaxspec.grammar.regular import Regular

_CACHED = 32
"""Most automata kept for later requests; each has at most some 10 MB."""


class Automata:
    """Compiles automata for one model. Thread-safe."""

    def __init__(
        self,
        read: Callable[[], Any],
        bytes_of: Callable[[int], bytes],
        vocab_size: int,
        eos_ids: Sequence[int],
    ):
        """Create a factory; the first regular grammar reads the tokenizer.

        Args:
            read: Returns llguidance's form of the tokenizer.
            bytes_of: Bytes of each token id, also of special ones.
            vocab_size: Number of token ids of the model.
            eos_ids: Ids that may follow a complete output.
        """
        self._read, self._vocab_size, self._eos_ids = read, vocab_size, eos_ids
        self._bytes_of = bytes_of
        self._compiler: AutomatonCompiler | None = None
        self._found = collections.OrderedDict[Regular, Automaton | None]()
        self._lock = threading.Lock()

    def of(self, regular: Regular) -> Automaton | None:
        """Return the automaton of a grammar, the same for equal grammars; None if it is too large.

        Raises:
            ValueError: the tokenizer is of a kind without grammars.
        """
        with self._lock:
            if regular not in self._found:
                self._found[regular] = self._compiled(regular)
            self._found.move_to_end(regular)
            if len(self._found) > _CACHED:
                self._found.popitem(last=False)
            return self._found[regular]

    def _compiled(self, regular: Regular) -> Automaton | None:
        try:
            self._compiler = self._compiler or self._make_compiler()
        except ValueError:
            if regular.regex is None:
                return None  # a limit alone needs no llguidance on the host
            raise
        try:
            if regular.regex is None:
                assert regular.thinking_end is not None
                return self._compiler.compile_limit(regular.thinking_end, self._bytes_of)
            return self._compiler.compile(
                regular.regex,
                thinking_end=regular.thinking_end,
                thinking_start=regular.thinking_start,
            )
        except ValueError:
            return None  # the host masks its tokens instead

    def _make_compiler(self) -> AutomatonCompiler:
        tokens = self._read()
        texts = [
            None if tokens.is_special_token(token) else tokens.decode_bytes([token])
            for token in range(tokens.vocab_size)
        ]
        return AutomatonCompiler(texts, self._eos_ids, self._vocab_size)
