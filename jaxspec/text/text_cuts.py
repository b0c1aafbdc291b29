"""TextCuts: places at which a long text may be cut without changing the tokens on either side.

A tokenizer matches added tokens, normalizes the text between them, splits it into words and encodes
each word by itself. So tokens stay the same at a cut between two words that no other step spans.
"""

import functools
import itertools
import re
from collections.abc import Iterator

import tokenizers

_BEFORE, _AFTER = "A-Za-z0-9", " \n"  # characters on both sides of a cut
_PROBED = "aZ1.'\t \n"
_PROBE_LENGTH = 4
_SEARCHED = 2**16  # characters in which a cut is looked for; a longer search would hold the GIL
_GROWTH = 4


class TextCuts:
    """Yields parts of long texts for one tokenizer.

    A cut follows an ASCII letter or digit and precedes a space or a line break. Whether the
    tokenizer splits words there is tried on all short texts of a few kinds of characters, because
    the rules are regular expressions; those of published models look at most one character ahead.
    For example, GPT-2's rules split "ab cd" into "ab" and " cd", those of SentencePiece without
    words do not.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer

    def ends(self, text: str, size: int) -> Iterator[str]:
        """Yield longer and longer ends of `text`, the first of at most `size` characters.

        The last one is the text itself.
        """
        end = len(text)
        while self._place is not None and size < len(text):
            start = len(text) - size
            if place := self._place.search(text, start, min(start + _SEARCHED, end)):
                end = place.end()
                yield text[end:]
            size *= _GROWTH
        yield text

    def beginnings(self, text: str, size: int) -> Iterator[str]:
        """Yield longer and longer beginnings of `text`, the first of at least `size` characters.

        The last one is the text itself.
        """
        while self._place is not None and size < len(text):
            if place := self._place.search(text, size, size + _SEARCHED):
                yield text[: place.end()]
            size *= _GROWTH
        yield text

    @functools.cached_property
    def _place(self) -> re.Pattern[str] | None:
        """Pattern of the character before a cut; None if no cut is safe."""
        after = "".join(character for character in _AFTER if self._splits_before(character))
        return re.compile(f"[{_BEFORE}](?=[{after}])") if after else None

    def _splits_before(self, character: str) -> bool:
        place = re.compile(f"[{_BEFORE}](?={character})")
        for token in self._tokenizer.get_added_tokens_decoder().values():
            strips = token.rstrip and re.search(f"[{_BEFORE}]$", token.content)
            looks_back = token.single_word and token.content.startswith(character)
            if strips or looks_back or place.search(token.content):
                return False
        words = functools.cache(self._words)
        return all(
            words(text) == words(text[: found.end()]) + words(text[found.end() :])
            for text in map("".join, itertools.product(_PROBED, repeat=_PROBE_LENGTH))
            for found in place.finditer(text)
        )

    def _words(self, text: str) -> list[str]:
        """Return the parts of a text without added tokens that are encoded one by one."""
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        return [normal] if splitter is None else [w for w, _ in splitter.pre_tokenize_str(normal)]
