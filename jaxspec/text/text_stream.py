"""TextStream: incremental detokenization."""

from collections.abc import Iterable
from typing import Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are not a whole character


class Decoder(Protocol):
    """The part of `Tokenizer` that a stream needs."""

    has_byte_tokens: bool

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...

    def is_byte_token(self, token_id: int) -> bool: ...


class TextStream:
    """Incremental detokenizer of one request; create it with `Tokenizer.stream`.

    The joined results of `push` and `flush` equal `decode` of all ids, however they are split.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Only a window of the newest ids is decoded again. It begins with ids whose text is already
        # returned, because some decoders treat the first token of a text differently.
        self._window: list[int] = []
        self._num_context = 0  # number of such ids
        self._num_shown = 0  # number of characters of the window's text already returned

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that further ids can't change; bytes of unfinished characters wait."""
        self._window.extend(ids)
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        certain = max(self._certain_length(text), self._num_shown)
        shown = text[self._num_shown : certain]
        self._num_shown = certain
        if shown and certain == len(text):
            # A character ends here, so the ids since the last such position decode independently.
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_shown = len(self._tokenizer.decode(self._window, self._skip_special_tokens))
        return shown

    def flush(self) -> str:
        """Return the waiting text at the end of the output, unfinished bytes as U+FFFD."""
        shown = self.waiting
        self._window, self._num_context, self._num_shown = [], 0, 0
        return shown

    def text_of(self, token_id: int) -> str:
        """Return the text of a single token, also of a special one; partial bytes are U+FFFD."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    @property
    def waiting(self) -> str:
        """The waiting text, as `flush` would return it."""
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        return text[self._num_shown :]

    def _certain_length(self, text: str) -> int:
        """Return the length of the part of `text` that further ids can't change."""
        if self._tokenizer.has_byte_tokens:
            # One invalid byte makes the decoder replace the whole run of byte tokens around it.
            end = len(self._window)
            while end and self._may_be_in_a_run(self._window[end - 1]):
                end -= 1
            if end < len(self._window):
                return len(self._tokenizer.decode(self._window[:end], self._skip_special_tokens))
        # Unfinished bytes at the end decode to one U+FFFD; all text before it is final.
        return len(text.removesuffix(UNFINISHED))

    def _may_be_in_a_run(self, token_id: int) -> bool:
        is_silent = not self._tokenizer.decode([token_id], self._skip_special_tokens)
        return is_silent or self._tokenizer.is_byte_token(token_id)
