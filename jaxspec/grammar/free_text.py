"""Masks of text before or without a grammar: any tokens, or those of reasoning.

Reasoning may take thousands of tokens, so its masks are made once. They are selected by the longest
beginning of `</think>` at the end of the text, because no token may spell it out: only its own
token ends the reasoning.
"""

from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np

from jaxspec.grammar.thinking import Reasoning
from jaxspec.text.parsers.output_parser import THINK_ENDS
from jaxspec.text.tokenizer import Tokenizer

BITS = 32
_ENDS = THINK_ENDS.encode()


def mask_of(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return the mask of some ids: a bit of int32 words for each, lowest first."""
    bits = np.zeros(-(-vocab_size // BITS) * BITS, bool)
    bits[ids if isinstance(ids, np.ndarray) else list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def bit_of(token: int) -> np.int32:
    """Return the word of a mask in which only a token's bit is set."""
    return np.uint32(1 << token % BITS).astype(np.int32)


def is_allowed(token: int, mask: np.ndarray) -> bool:
    return bool(mask[token // BITS] & bit_of(token))


class FreeText(Protocol):
    """Text whose tokens follow from the state of the reasoning alone."""

    def mask(self, reasoning: Reasoning) -> np.ndarray: ...


class AnyTokens:
    """Text of any tokens."""

    def __init__(self, vocab_size: int):
        self._mask = mask_of(range(vocab_size), vocab_size)

    def mask(self, reasoning: Reasoning) -> np.ndarray:
        return self._mask


class Thoughts:
    """Reasoning that its own token `</think>` ends: text without special tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int, excluded: Collection[int]):
        """Make the masks; `end` is the token, and `excluded` are the EOS ids."""
        vocabulary = tokenizer.get_vocab()
        special = {*tokenizer.special_tokens.values(), *excluded}
        ids = {token for token in vocabulary.values() if token < vocab_size} - special - {end}
        last = THINK_ENDS[-1]
        closing = {
            token: tokenizer.bytes_of(token)
            for text, token in vocabulary.items()
            if last in text and token in ids
        }
        text, self._masks = mask_of(ids | {end}, vocab_size), []
        for length in range(len(_ENDS)):
            spelled = {token for token, own in closing.items() if _ENDS in _ENDS[:length] + own}
            self._masks.append(text & ~mask_of(spelled, vocab_size))

    def mask(self, reasoning: Reasoning) -> np.ndarray:
        lengths = range(len(_ENDS) - 1, -1, -1)
        return self._masks[next(n for n in lengths if reasoning.tail.endswith(_ENDS[:n]))]
