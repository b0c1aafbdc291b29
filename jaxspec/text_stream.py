"""TextStream: the text of tokens as they come, however they are split."""

from collections.abc import Iterable
from typing import Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder puts for bytes that are no character


class Decoder(Protocol):
    """What a stream asks of a tokenizer."""

    has_byte_tokens: bool

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """As `Tokenizer.decode`."""
        ...

    def is_byte_token(self, token_id: int) -> bool:
        """As `Tokenizer.is_byte_token`."""
        ...


class TextStream:
    """Turns token ids into text as they come.

    All that `push` and `flush` return, joined, is `decode` of all ids, however they were split.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool) -> None:
        """Start empty; `Tokenizer.stream` is the way to make one."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Only the newest ids are decoded again, not the whole output. They follow a few whose text
        # is out: some decoders treat the first token of a text its own way.
        self._window: list[int] = []
        self._num_context = 0  # ids of the window whose text was out when the others came
        self._num_shown = 0  # characters of the window's text that are out

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain; bytes that may still become a character wait."""
        self._window.extend(ids)
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        certain = max(self._certain_length(text), self._num_shown)
        shown = text[self._num_shown : certain]
        self._num_shown = certain
        if shown and certain == len(text):
            # A character ends here, so the ids since the last such place can stand alone.
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_shown = len(self._tokenizer.decode(self._window, self._skip_special_tokens))
        return shown

    def flush(self) -> str:
        """The text still waiting, at the end of the output: unfinished bytes come out as U+FFFD."""
        shown = self.waiting
        self._window, self._num_context, self._num_shown = [], 0, 0
        return shown

    def text_of(self, token_id: int) -> str:
        """The text of one token alone, a special one's too; half a character is U+FFFD."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    @property
    def waiting(self) -> str:
        """The text still waiting, as it would be if the output ended here."""
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        return text[self._num_shown :]

    def _certain_length(self, text: str) -> int:
        """How much of the window's `text` no further id can change."""
        if self._tokenizer.has_byte_tokens:
            # One bad byte makes the decoder give up the whole run of byte tokens it is in.
            end = len(self._window)
            while end and self._may_be_in_a_run(self._window[end - 1]):
                end -= 1
            if end < len(self._window):
                return len(self._tokenizer.decode(self._window[:end], self._skip_special_tokens))
        # Unfinished bytes at the end are one character; those before it are settled.
        return len(text.removesuffix(UNFINISHED))

    def _may_be_in_a_run(self, token_id: int) -> bool:
        is_silent = not self._tokenizer.decode([token_id], self._skip_special_tokens)
        return is_silent or self._tokenizer.is_byte_token(token_id)
