"""Text to tokens and back: a checkpoint's tokenizer, its chat template, and streamed text."""

import concurrent.futures
import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, decoders

from jaxspec import checks, tokenizer_files
from jaxspec.chat_boundaries import MAX_PART, AddedTokens
from jaxspec.chat_template import ChatTemplate
from jaxspec.checks import are_integers, boolean, shown
from jaxspec.template_process import Rendered
from jaxspec.text_stream import UNFINISHED, TextStream
from jaxspec.tokenizer_files import raise_for

SHRINKING = 4
"""How many bytes a normalizer may make one of: NFC makes at most three."""
_LONG_TEXT = MAX_PART  # characters; the tokens of shorter ones are there within milliseconds
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ChatPrompt(NamedTuple):
    """A conversation as a prompt."""

    text: str
    ids: list[int]
    boundaries: tuple[int, ...]  # tokens that prompts of further turns begin with, at least


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

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        """Another process reads its folder again."""
        return type(self), (self._folder,)

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
        return self._encoding(text, add_special_tokens, max_model_len).ids

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
            raise_for(error, f"The tokenizer of {self._folder.name} fails on {shown(ids)}")

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
        found = self.chat_prompt(
            messages, tools, add_generation_prompt, max_model_len=max_model_len, **kwargs
        )
        return found.ids

    def chat_prompt(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        max_model_len: int | None = None,
        finds_boundaries: bool = False,
        **kwargs: Any,
    ) -> ChatPrompt:
        """The text of a conversation and what `chat` makes of it.

        `finds_boundaries`: whether it is found out where the prompts of further turns part from it,
        which takes about as long again.

        Raises:
            ValueError: as in `render_chat` and `encode`.
        """
        written = self._render(finds_boundaries, messages, tools, add_generation_prompt, **kwargs)
        # The template writes BOS itself.
        text, ids = written.text, self._encoding(written.text, False, max_model_len).ids
        encode = functools.partial(self._encoding, add_special_tokens=False)
        boundaries = self._added.stable_counts(text, written.num_kept, ids, encode)
        return ChatPrompt(text, ids, boundaries)

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
        options = {
            "chat_template": chat_template,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._render(False, messages, tools, add_generation_prompt, **options, **kwargs).text

    def _render(
        self,
        tries_turns: bool,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Rendered:
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
            tries_turns=tries_turns,
        )

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A new incremental detokeniser, for one request."""
        return TextStream(self, skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token alone, a special one's too; half a character's as they are."""
        text = self.decode([token_id], skip_special_tokens=False)
        token = self._tokenizer.id_to_token(token_id) or ""
        if UNFINISHED not in text:
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

    def _encoding(
        self, text: str, add_special_tokens: bool, max_model_len: int | None = None
    ) -> Encoding:
        """The tokens of a text; where in it they are if it is no longer than `_LONG_TEXT`."""
        if not isinstance(text, str):
            raise ValueError(f"A text to be tokenized must be a str, got {shown(text)}.")
        self._check(text, max_model_len)
        model, special = self._tokenizer, add_special_tokens
        try:
            if len(text) <= _LONG_TEXT:
                return model.encode(text, add_special_tokens=special)
            encode = model.encode_batch_fast
            (found,) = _in_thread(lambda: encode([text], add_special_tokens=special))
            return found
        except BaseException as error:
            raise_for(error, f"The tokenizer of {self._folder.name} fails on this text")

    @functools.cached_property
    def _added(self) -> AddedTokens:
        found = self._tokenizer.get_added_tokens_decoder()
        return AddedTokens({token.content: token_id for token_id, token in found.items()})

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


def _in_thread(tokenize: Callable[[], list[Encoding]]) -> list[Encoding]:
    """What it gives in a thread, for which the caller waits: only so Ctrl-C is heard meanwhile.

    Batches let other threads run, as a single text does not.
    """
    result = concurrent.futures.Future[list[Encoding]]()

    def run() -> None:
        try:
            result.set_result(tokenize())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="tokenize", daemon=True).start()
    return result.result()
