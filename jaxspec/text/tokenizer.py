"""Tokenizer: encodes text and chats, and decodes tokens, with the files of a checkpoint."""

import concurrent.futures
import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, decoders

from jaxspec import checks
from jaxspec.checks import PromptTooLongError, are_integers, boolean, is_integer, shown
from jaxspec.text import tokenizer_files
from jaxspec.text.chat_boundaries import MAX_PART, AddedTokens
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.conversations import conversations_of
from jaxspec.text.template_process import Rendered
from jaxspec.text.text_cuts import TextCuts
from jaxspec.text.text_stream import UNFINISHED, TextStream
from jaxspec.text.tokenizer_files import raise_for

SHRINKING = 4
"""Most bytes that a normalizer may reduce to one; NFC reduces at most three."""
_LONG_TEXT = MAX_PART  # characters; shorter texts are tokenized within milliseconds
_GUESSED_LENGTH = 8  # characters per token that are read at first of a text to be truncated
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ChatPrompt(NamedTuple):
    """A conversation as a prompt."""

    text: str
    ids: list[int]
    boundaries: tuple[int, ...]  # numbers of leading tokens shared with prompts of later turns


class TokenizedTexts(dict[str, Any]):
    """Result of calling a `Tokenizer`, with the keys of transformers' tokenizers.

    Attributes:
        input_ids: Token ids of the text, or a list of those of each text.
        attention_mask: A 1 for each of them.
    """

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class Tokenizer:
    """Tokenizer of a checkpoint: its tokenizer.json and settings, or a GGUF file's metadata.

    Attributes:
        eos_ids: The id of the tokenizer's EOS token, if it has one. The model's configuration may
            list further ids, such as the end of a turn, which count as well.
        has_byte_tokens: True if the vocabulary has byte tokens such as `<0x00>`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the tokenizer of a folder or GGUF file.

        Raises:
            FileNotFoundError: the folder has no tokenizer.json, or the metadata no tokenizer.
            ValueError: the tokenizer is invalid.
        """
        folder = Path(checks.path("The folder of a tokenizer", folder))
        self._folder = folder
        self._tokenizer, settings, special_tokens = tokenizer_files.read(folder)
        # The file may contain the padding and truncation of training.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.has_byte_tokens = self._tokenizer.token_to_id("<0x00>") is not None
        self._chat_template = ChatTemplate(folder, settings, special_tokens)
        end = special_tokens.get("eos_token")
        end_id = None if end is None else self._tokenizer.token_to_id(end)
        self.eos_ids = () if end_id is None else (end_id,)
        self._special_tokens = special_tokens
        self._cuts = TextCuts(self._tokenizer)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        """Pickle the folder; unpickling reads it again."""
        return type(self), (self._folder,)

    def encode(
        self, text: str, add_special_tokens: bool = True, max_model_len: int | None = None
    ) -> list[int]:
        """Return the token ids of `text`.

        A text that can't fit `max_model_len` tokens is refused before tokenization: one with more
        UTF-8 bytes than `SHRINKING * max_model_len` of the vocabulary's longest tokens. This also
        refuses texts that fit only because the tokenizer drops most of them, such as long runs of
        spaces. Ctrl-C interrupts the tokenization of long texts at once.

        Args:
            text: The text.
            add_special_tokens: Add the tokens that the tokenizer puts around a text, such as BOS.
            max_model_len: Most tokens; None means unlimited.

        Raises:
            ValueError: `text` is not a string, has half of a surrogate pair or can't fit, or the
                tokenizer fails.
        """
        return self._encoding(text, add_special_tokens, max_model_len).ids

    def encode_last(self, text: str, num_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Return the last `num_tokens` ids of `encode`, but read no more of a text than they need.

        A text without a safe cut (`text_cuts.py`), such as a single long word, is read whole.

        Raises:
            ValueError: as in `encode`.
        """
        return self._part_ids(text, num_tokens, add_special_tokens, self._cuts.ends)[-num_tokens:]

    def encode_first(
        self, text: str, num_tokens: int, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the first `num_tokens` ids of `encode`, as `encode_last` does the last ones."""
        found = self._part_ids(text, num_tokens, add_special_tokens, self._cuts.beginnings)
        return found[:num_tokens]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, skipping ids without a token, as in padded vocabularies.

        Raises:
            ValueError: an id is not an unsigned 32-bit integer, or the tokenizer fails.
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

    # Names of transformers' tokenizers, for scripts

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True
    ) -> TokenizedTexts:
        """Return the token ids of a text or of each of several; see `encode`."""
        texts = [text] if isinstance(text, str) else text
        ids = [self.encode(each, add_special_tokens) for each in texts]
        masks = [[1] * len(each) for each in ids]
        if isinstance(text, str):
            return TokenizedTexts(input_ids=ids[0], attention_mask=masks[0])
        return TokenizedTexts(input_ids=ids, attention_mask=masks)

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def eos_token(self) -> str | None:
        """The EOS token, or None."""
        return self._special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the EOS token, or None."""
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def bos_token(self) -> str | None:
        """The BOS token, or None."""
        return self._special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the BOS token, or None."""
        return None if self.bos_token is None else self._tokenizer.token_to_id(self.bos_token)

    def batch_decode(
        self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each sequence of ids; see `decode`."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or a list of those of several; None for unknown ones."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the token of an id, or a list of those of several; None for unknown ones."""
        if is_integer(ids):
            return self._tokenizer.id_to_token(int(ids))  # pyright: ignore[reportArgumentType]
        return [self._tokenizer.id_to_token(int(each)) for each in ids]  # pyright: ignore

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Iterable[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Render a conversation as transformers does: by default without the start of an answer.

        Args:
            conversation: A list of messages, or a list of conversations.
            tools: As in `render_chat`.
            add_generation_prompt: As in `render_chat`.
            tokenize: Return token ids instead of text.
            **kwargs: Further arguments of `render_chat`.

        Returns:
            The text or the token ids; a list of them for several conversations.

        Raises:
            ValueError: as in `render_chat`.
        """
        many = conversations_of(conversation)
        call = self.chat if tokenize else self.render_chat
        found = [call(each, tools, add_generation_prompt, **kwargs) for each in many]
        return found[0] if many[0] is conversation else found

    # Chats

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        max_model_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a conversation; see `render_chat` and `encode`."""
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
        """Return the text, token ids and boundaries of a conversation.

        With `finds_boundaries`, which takes about twice as long, the boundaries are the numbers of
        leading tokens shared with prompts of later turns; otherwise there are none.

        Raises:
            ValueError: as in `render_chat` and `encode`.
        """
        written = self._render(finds_boundaries, messages, tools, add_generation_prompt, **kwargs)
        # The template includes BOS.
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
        """Return the text of a conversation, rendered by a chat template.

        Templates are untrusted parts of checkpoints, so they run in a sandbox in a separate
        process: without access to files or attributes of Python objects, without changes to the
        arguments, and with limits of time and memory (`template_process.py`).

        Args:
            messages: Messages of the form `{"role": ..., "content": ...}`, made of JSON values.
            tools: Tool definitions, made of JSON values.
            add_generation_prompt: End the text with the beginning of an answer.
            chat_template: Source of a template, or the name of one of the checkpoint. None uses
                the checkpoint's default, or with tools its template for tools.
            continue_final_message: End the text with the content of the last message.
            chat_template_kwargs: Switches of the template, such as `{"enable_thinking": False}`.
            **kwargs: Further switches of the template.

        Raises:
            ValueError: the checkpoint has no template, an argument is not a JSON value, or the
                template rejects the conversation or exceeds a limit.
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
        """Return a new incremental detokenizer for one request."""
        return TextStream(self, skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a single token, also of a special one or part of a character."""
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
        """Source of the checkpoint's chat template, of the one for tools if there are two."""
        return self._chat_template.source

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of added tokens that mark up text: special ones, and those in angle brackets."""
        return {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def to_json(self) -> str:
        """Return the content of a tokenizer.json with this tokenizer."""
        return self._tokenizer.to_str()

    def has_token(self, text: str) -> bool:
        """Return whether `text` is one token of the vocabulary."""
        return self._tokenizer.token_to_id(text) is not None

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether the token is a byte token such as `<0xE2>`, SentencePiece's fallback."""
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None

    @property
    def spaces_tokens_apart(self) -> bool:
        """True if decoding joins tokens by spaces: without a decoder, or with WordPiece's."""
        decoder = self._tokenizer.decoder
        return decoder is None or isinstance(decoder, decoders.WordPiece)

    def _encoding(
        self, text: str, add_special_tokens: bool, max_model_len: int | None = None
    ) -> Encoding:
        """Encode a text; only texts up to `_LONG_TEXT` characters get token offsets."""
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

    def _part_ids(
        self,
        text: str,
        num_tokens: int,
        add_special_tokens: bool,
        parts: Callable[[str, int], Iterable[str]],
    ) -> list[int]:
        """Return the ids of the first of `parts` with at least `num_tokens`, or of the text."""
        if not isinstance(text, str) or len(text) <= _LONG_TEXT:
            return self.encode(text, add_special_tokens)
        self._check(text, None)
        # A part has special tokens at a cut, too.
        wanted = num_tokens + self._tokenizer.num_special_tokens_to_add(False)
        ids = list[int]()
        for part in parts(text, max(_LONG_TEXT, _GUESSED_LENGTH * wanted)):
            ids = self.encode(part, add_special_tokens)
            if len(ids) >= wanted:
                break
        return ids

    @functools.cached_property
    def _added(self) -> AddedTokens:
        found = self._tokenizer.get_added_tokens_decoder()
        return AddedTokens({token.content: token_id for token_id, token in found.items()})

    def _check(self, text: str, max_model_len: int | None) -> None:
        """Raise ValueError if `text` is not valid Unicode or can't fit."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"A text must be Unicode, and character {error.start} of this one is half of a "
                f"surrogate pair, {text[error.start]!r}. Decode its bytes anew, or remove it."
            ) from error
        if max_model_len is None or size <= SHRINKING * max_model_len:
            return  # it may fit with any vocabulary
        most = SHRINKING * max_model_len * self._longest_token
        if size > most:
            raise PromptTooLongError.of(
                f"it has {size:,} bytes, and texts of more than {SHRINKING} x {max_model_len} x "
                f"{self._longest_token} = {most:,} bytes are refused unread (the longest of this "
                f"tokenizer's tokens has {self._longest_token})",
                max_model_len,
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Number of bytes of text of the longest token, or slightly more."""
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        longest = max((len(token.encode()) for token in added), default=1)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):  # one character per byte
            return max(longest, max(map(len, vocabulary), default=1))
        return max(longest, max((len(token.encode()) for token in vocabulary), default=1))


def _in_thread(tokenize: Callable[[], list[Encoding]]) -> list[Encoding]:
    """Run `tokenize` in a thread and wait for it, so that Ctrl-C interrupts the caller.

    It must be a batch call of the library, which releases the GIL; one for a single text does not.
    """
    result = concurrent.futures.Future[list[Encoding]]()

    def run() -> None:
        try:
            result.set_result(tokenize())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="tokenize", daemon=True).start()
    return result.result()
