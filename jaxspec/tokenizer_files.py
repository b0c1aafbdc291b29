"""What a checkpoint's files say of its tokens; whatever they hold, an error names the file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import tokenizers

from jaxspec.files import open_file, read_json
from jaxspec.gguf import is_gguf

MAX_TOKENIZER_BYTES = 2**28
"""The longest tokenizer.json that is read."""
_MAX_REASON_CHARACTERS = 300


def _bytes_of_characters() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


BYTES_OF_CHARACTERS = _bytes_of_characters()
"""The bytes that characters of byte-level vocabularies stand for: what has no shape has another's.

GPT-2's table, which all of them took over.
"""


def raise_for(error: BaseException, what: str, file: str = "tokenizer.json") -> NoReturn:
    """Raise an error of the library `tokenizers` as a ValueError, and any other as it is.

    The library raises nothing narrower than Exception, and its panics are not even that.
    """
    is_panic = type(error).__name__ == "PanicException"
    if not (is_panic or isinstance(error, Exception)) or isinstance(error, MemoryError):
        raise error
    reason = str(error)[:_MAX_REASON_CHARACTERS]
    raise ValueError(
        f"{what}: {reason}. Download {file} again, or update `tokenizers` {tokenizers.__version__}."
    ) from error


class Contents(NamedTuple):
    """What a checkpoint says of its tokens."""

    tokenizer: tokenizers.Tokenizer
    settings: dict[str, Any]  # those of tokenizer_config.json
    special_tokens: dict[str, str]  # such as bos_token, by name


def read(source: Path) -> Contents:
    """What the files of a folder say, or the metadata of a GGUF file.

    Raises:
        FileNotFoundError: there is no tokenizer.
        ValueError: it, or what belongs to it, is broken.
    """
    if not is_gguf(source):
        config = settings(source / "tokenizer_config.json")
        return Contents(load(source), config, special_tokens(source, config))
    from jaxspec.gguf.tokenizer import read_tokenizer  # no other model needs it

    try:
        tokenizer, config = read_tokenizer(source)
    except (ValueError, FileNotFoundError):
        raise
    except BaseException as error:
        what = f"{source} must hold a tokenizer that `tokenizers` runs, and does not"
        raise_for(error, what, "the file")
    return Contents(tokenizer, config, _tokens_in(config))


def load(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer in the folder's tokenizer.json.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no regular file, too long, or none that `tokenizers` reads.
    """
    path = folder / "tokenizer.json"
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Text needs a tokenizer, but {folder} has no tokenizer.json. Copy the checkpoint's "
            'there, or pass token ids: {"prompt_token_ids": [...]}.'
        ) from error
    if size > MAX_TOKENIZER_BYTES:
        raise ValueError(
            f"{path} must have at most {MAX_TOKENIZER_BYTES:,} bytes, got {size:,}. Download it "
            "again."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        raise_for(error, f"{path} must be one that `tokenizers` reads, and is not")


def settings(path: Path) -> dict[str, Any]:
    """The JSON object in a file that a checkpoint may lack; empty where it does.

    Raises:
        ValueError: the file is no JSON object, or can't be read.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens such as bos_token by name, as tokenizer_config.json's content `config` has them.

    What it lacks is taken from special_tokens_map.json. A token is a text or `{"content": text}`.

    Raises:
        ValueError: as `settings`.
    """
    return _tokens_in(settings(folder / "special_tokens_map.json")) | _tokens_in(config)


def _tokens_in(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, token in config.items():
        if isinstance(token, Mapping):
            token = token.get("content")
        if name.endswith("_token") and isinstance(token, str) and token and _is_unicode(token):
            found[name] = token
    return found


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can write it: JSON may hold half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
