"""Text to tokens and back: a checkpoint's tokenizer, its chat template, and streamed text."""

import concurrent.futures
import functools
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import decoders

from jaxspec import checks, tokenizer_files
from jaxspec.chat_template import ChatTemplate
from jaxspec.checks import are_integers, boolean, shown
from jaxspec.tokenizer_files import raise_for

SHRINKING = 4
"""How many bytes a normalizer may make one of: NFC makes at most three."""
_LONG_TEXT = 2**16  # characters; the tokens of shorter ones are there within milliseconds
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder puts for bytes that are no character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer of a checkpoint folder, from its `tokenizer.json` and settings files.

    That of a GGUF file is in its metadata.

    `eos_ids` holds the id of its own end token, if it has one. The model's configuration names
    others: a chat model ends a turn with another token than a text, and all of them count.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read `folder`, which may be a GGUF file.

        Raises:
            FileNotFoundError: it has no tokenizer.json, or the metadata no tokenizer.
            ValueError: the tokenizer is broken.
        """
        folder = Path(checks.path("The folder of a tokenizer", folder))
        self._folder = folder
        self._tokenizer, settings, special_tokens = tokenizer_files.read(folder)
        # The file may carry the padding and truncation of training.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.has_byte_tokens = self._tokenizer.token_to_id("<0x00>") is not None
        self._chat_template = ChatTemplate(folder, settings, special_tokens)
        end = special_tokens.get("eos_token")
        end_id = None if end is None else self._tokenizer.token_to_id(end)
        self.eos_ids = () if end_id is None else (end_id,)

    def encode(
        self, text: str, add_special_tokens: bool = True, max_model_len: int | None = None
    ) -> list[int]:
        """The token ids of `text`, with what the tokenizer puts around a text (such as BOS).

        A text that can't fit `max_model_len` tokens is refused unread: one whose UTF-8 has more
        bytes than `SHRINKING * max_model_len` of the vocabulary's longest tokens. So is one that
        would fit only because the tokenizer drops most of it, such as long runs of spaces.

        Ctrl-C ends the wait for a long text's tokens at once.

        Raises:
            ValueError: `text` is no text, has half of a surrogate pair, or can't fit; or the
                tokenizer fails.
        """
        if not isinstance(text, str):
            raise ValueError(f"A text to be tokenized must be a str, got {shown(text)}.")
        self._check(text, max_model_len)
        try:
            if len(text) > _LONG_TEXT:
                return self._encode_long(text, add_special_tokens)
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            raise_for(error, f"The tokenizer of {self._folder} fails on this text")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids without a token (a padded vocabulary has some) give nothing.

        Raises:
            ValueError: `ids` are no integers that fit in 32 bits, or the tokenizer fails.
        """
        ids = list(ids)
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not are_integers(ids) or any(not 0 <= token < 2**32 for token in ids):
                raise ValueError(
                    f"Token ids must be integers from 0 to {2**32 - 1}, got {shown(ids)}."
                ) from error
            raise_for(error, f"The tokenizer of {self._folder} fails on {shown(ids)}")

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        max_model_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The token ids of a conversation; arguments as in `render_chat` and `encode`."""
        text = self.render_chat(messages, tools, add_generation_prompt, **kwargs)
        # The template writes BOS itself.
        return self.encode(text, add_special_tokens=False, max_model_len=max_model_len)

    def render_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation by the checkpoint's chat template, or by `chat_template`.

        `messages` are `{"role": ..., "content": ...}`; `kwargs` and `chat_template_kwargs` are the
        template's own switches, such as `enable_thinking=False`. All of them are JSON's values.
        `chat_template` is a template's text, or the name of one that the checkpoint has. With
        `continue_final_message` the text ends with the last message's content.

        Templates come with checkpoints, so they run in a sandbox, in a process of their own: they
        reach no files and no attributes of Python objects, change no arguments, and have limits of
        time and memory (`template_process.py`).

        Raises:
            ValueError: the checkpoint has no template, an argument is no value of JSON's, or the
                template refuses the conversation or goes beyond a limit.
        """
        switches = chat_template_kwargs
        if switches is None or (isinstance(switches, Mapping) and kwargs):
            switches = {**(switches or {}), **kwargs}
        return self._chat_template.render(
            messages,
            tools,
            add_generation_prompt,
            switches,
            template=chat_template,
            continue_final_message=boolean("continue_final_message", continue_final_message),
        )

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        """A new incremental detokeniser, for one request."""
        return TextStream(self, skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token alone, a special one's too; half a character's as they are."""
        text = self.decode([token_id], skip_special_tokens=False)
        token = self._tokenizer.id_to_token(token_id) or ""
        if _UNFINISHED not in text:
            return text.encode()
        if self.is_byte_token(token_id):
            return bytes.fromhex(token[3:5])
        alphabet = tokenizer_files.BYTES_OF_CHARACTERS
        return bytes(map(alphabet.__getitem__, token)) if set(token) <= alphabet.keys() else b""

    @property
    def chat_template(self) -> str | None:
        """The source of the checkpoint's chat template, that of chats with tools if it has two."""
        return self._chat_template.source

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token stands for one byte (`<0xE2>`), as SentencePiece falls back to."""
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None

    @property
    def spaces_tokens_apart(self) -> bool:
        """Whether decoding puts spaces between tokens, as without a decoder or by WordPiece's."""
        decoder = self._tokenizer.decoder
        return decoder is None or isinstance(decoder, decoders.WordPiece)

    def _check(self, text: str, max_model_len: int | None) -> None:
        """Refuse what is no Unicode, and what can't fit."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"A text must be Unicode, and character {error.start} of this one is half of a "
                f"surrogate pair, {text[error.start]!r}. Decode its bytes anew, or remove it."
            ) from error
        if max_model_len is None or size <= SHRINKING * max_model_len:
            return  # whatever the vocabulary
        most = SHRINKING * max_model_len * self._longest_token
        if size > most:
            raise ValueError(
                f"A prompt must fit max_model_len={max_model_len}, and a text of {size:,} bytes "
                f"can't: the longest of this tokenizer's tokens has {self._longest_token} bytes, "
                f"so texts of more than {SHRINKING} x {max_model_len} x {self._longest_token} = "
                f"{most:,} bytes are refused unread. Shorten it, or raise max_model_len."
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Bytes of text that the longest token stands for, or a little more."""
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        longest = max((len(token.encode()) for token in added), default=1)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):  # a character for each byte
            return max(longest, max(map(len, vocabulary), default=1))
        return max(longest, max((len(token.encode()) for token in vocabulary), default=1))

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenize in a thread, for which the caller waits: only so Ctrl-C is heard meanwhile."""
        result = concurrent.futures.Future[list[int]]()

        def tokenize() -> None:
            try:
                # It lets other threads run, as `encode` does not.
                (encoding,) = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
                result.set_result(encoding.ids)
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=tokenize, name="tokenize", daemon=True).start()
        return result.result()


class TextStream:
    """Turns token ids into text as they come.

    All that `push` and `flush` return, joined, is `decode` of all ids, however they were split.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
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
        return len(text.removesuffix(_UNFINISHED))

    def _may_be_in_a_run(self, token_id: int) -> bool:
        is_silent = not self._tokenizer.decode([token_id], self._skip_special_tokens)
        return is_silent or self._tokenizer.is_byte_token(token_id)
