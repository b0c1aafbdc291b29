"""Reading of a checkpoint's tokenizer files: tokenizer, settings, special tokens, chat templates.

The contents are untrusted; errors name the file.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import tokenizers

from jaxspec.checks import shown
from jaxspec.files import fill, open_file, read_json
from jaxspec.gguf import is_gguf
from jaxspec.text import vocabulary_files

MAX_TOKENIZER_BYTES = 2**28
"""Largest size of a tokenizer.json."""
_MAX_REASON_CHARACTERS = 300
_ID = re.compile("[0-9]{1,10}")
_TOKEN_FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"


def _bytes_of_characters() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


BYTES_OF_CHARACTERS = _bytes_of_characters()
"""Bytes by character of byte-level vocabularies, as in GPT-2.

Printable bytes are their Latin-1 characters, and the others characters from U+0100 on: a space is
U+0120.
"""


def raise_for(error: BaseException, what: str, file: str = "tokenizer.json") -> NoReturn:
    """Raise an error of the library `tokenizers` as a ValueError, and others unchanged.

    The library raises plain Exception, and its panics are BaseExceptions.
    """
    is_panic = type(error).__name__ == "PanicException"
    if not (is_panic or isinstance(error, Exception)) or isinstance(error, MemoryError):
        raise error
    reason = str(error)[:_MAX_REASON_CHARACTERS]
    raise ValueError(
        f"{what}: {reason}. Download {file} again, or update `tokenizers` {tokenizers.__version__}."
    ) from error


class Contents(NamedTuple):
    """Contents of a checkpoint's tokenizer files."""

    tokenizer: tokenizers.Tokenizer
    settings: dict[str, Any]  # contents of tokenizer_config.json
    special_tokens: dict[str, str]  # tokens by name, such as bos_token


def read(source: Path) -> Contents:
    """Read the tokenizer files of a folder, or the metadata of a GGUF file.

    Raises:
        FileNotFoundError: there is no tokenizer.
        ValueError: the tokenizer or its settings are invalid.
    """
    if not is_gguf(source):
        config = settings(source / "tokenizer_config.json")
        tokenizer, named = load(source, config)
        special = named | special_tokens(source, config)
        add_tokens(tokenizer, source, config, special)
        return Contents(tokenizer, config, special)
    from jaxspec.gguf.tokenizer import read_tokenizer  # needed only for GGUF files

    try:
        tokenizer, config = read_tokenizer(source)
    except (ValueError, FileNotFoundError):
        raise
    except BaseException as error:
        what = f"{source} must hold a tokenizer that `tokenizers` runs, and does not"
        raise_for(error, what, "the file")
    return Contents(tokenizer, config, _tokens_in(config))


def load(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Read the folder's tokenizer.json, or the files of `vocabulary_files` in its place.

    Args:
        folder: The checkpoint.
        config: The content of its tokenizer_config.json.

    Returns:
        The tokenizer, and the special tokens by name that its own file gives.

    Raises:
        FileNotFoundError: there is no tokenizer.
        ValueError: a file is not a regular file, too large, or not readable by `tokenizers`.
    """
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        try:
            return vocabulary_files.load(folder, config)
        except (ValueError, FileNotFoundError):
            raise
        except BaseException as error:
            what = f"The vocabulary in {folder} must be one that `tokenizers` runs, and is not"
            raise_for(error, what, "its files")
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ValueError(
            f"{path} must have at most {MAX_TOKENIZER_BYTES:,} bytes, got {size:,}. Download it "
            "again."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path)), {}
    except BaseException as error:
        raise_for(error, f"{path} must be one that `tokenizers` reads, and is not")


def add_tokens(
    tokenizer: tokenizers.Tokenizer,
    folder: Path,
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
) -> None:
    """Add the tokens that only other files than tokenizer.json name, as transformers does.

    These are `added_tokens_decoder` in `config` (the contents of tokenizer_config.json) and
    added_tokens.json, with their ids, and further special tokens of `config`, without. The
    `special_tokens` such as bos_token are never split; one that the vocabulary lacks is not added.

    Raises:
        ValueError: a token is malformed, or has another id in the tokenizer or none that is free.
    """
    names = ("additional_special_tokens", "extra_special_tokens")
    further = [text for name in names for text in _further(folder, name, config.get(name))]
    special = {*further, *special_tokens.values()}
    found: dict[str, tuple[int | None, Any]] = {
        **_ids_in(folder / "added_tokens.json", special),
        **_declared(folder, config),
    }
    in_vocabulary = [
        text for text in special_tokens.values() if tokenizer.token_to_id(text) is not None
    ]
    for text in (*further, *in_vocabulary):
        found.setdefault(text, (None, tokenizers.AddedToken(text, special=True)))
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [(text, *entry) for text, entry in found.items() if text not in known]
    missing.sort(key=lambda entry: (entry[1] is None, entry[1] or 0))  # a stable sort
    for text, token_id, token in missing:
        tokenizer.add_tokens([token])
        if token_id not in (None, tokenizer.token_to_id(text)):
            raise ValueError(
                f"{folder}: the token {shown(text)} has the id {token_id} in "
                f"tokenizer_config.json or added_tokens.json, and {tokenizer.token_to_id(text)} "
                "after those of tokenizer.json. Download all tokenizer files of one version."
            )


def _further(folder: Path, name: str, value: Any) -> list[str]:
    """Return the special tokens in a list, or in an object by name."""
    entries = list(value.values()) if isinstance(value, Mapping) else [] if value is None else value
    texts = list[Any]()
    if isinstance(entries, list):
        texts = [each.get("content") if isinstance(each, Mapping) else each for each in entries]
    if not isinstance(entries, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: {name} must be a list or an object of texts or "
            f'{{"content": text}}, got {shown(value)}. Download it again.'
        )
    return [text for text in texts if text and _is_unicode(text)]


def _declared(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    """Return the entries of `added_tokens_decoder` by their text, with their ids."""
    entries = config.get("added_tokens_decoder") or {}
    found = {}
    for token_id, entry in entries.items() if isinstance(entries, Mapping) else [("", entries)]:
        text = entry.get("content") if isinstance(entry, Mapping) else None
        if not _ID.fullmatch(token_id) or not isinstance(text, str) or not _is_unicode(text):
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map ids to "
                f'{{"content": text}}, got {shown(token_id)}: {shown(entry)}. Download it again.'
            )
        flags = {name: entry[name] for name in _TOKEN_FLAGS if isinstance(entry.get(name), bool)}
        if text:
            found[text] = int(token_id), tokenizers.AddedToken(text, **flags)
    return found


def _ids_in(path: Path, special: Collection[str]) -> dict[str, tuple[int, Any]]:
    """Return the tokens of added_tokens.json by their text, with their ids."""
    found = {}
    for text, token_id in settings(path).items():
        if type(token_id) is not int or token_id < 0 or not _is_unicode(text):
            raise ValueError(
                f"{path} must map texts to ids, got {shown(text)}: {shown(token_id)}. Download it "
                "again."
            )
        if text:
            is_special = text in special
            token = tokenizers.AddedToken(text, normalized=False, special=is_special)
            found[text] = token_id, token
    return found


def settings(path: Path) -> dict[str, Any]:
    """Read the JSON object of an optional file; empty if the file is absent.

    Raises:
        ValueError: the file can't be read or is not a JSON object.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return tokens such as bos_token by name.

    They are read from `config`, the contents of tokenizer_config.json, and those it lacks from
    special_tokens_map.json. A token is a string or `{"content": string}`.

    Raises:
        ValueError: as in `settings`.
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
    """Return whether UTF-8 can encode `text`: JSON may contain half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


MAX_TEMPLATE_BYTES = 2**20
"""Largest size of a template, about thirty times that of the largest published ones."""
OWN_FILE, FURTHER_FOLDER = "chat_template.jinja", "additional_chat_templates"
_MAX_TEMPLATES = 64


def read_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return template sources by name, from the first place that has them, as in transformers.

    The places are chat_template.jinja, `settings`, and the older chat_template.json. Files
    additional_chat_templates/NAME.jinja add others. GGUF files have only settings.

    Raises:
        ValueError: a template has the wrong type or is too long, or a file can't be read.
    """
    if is_gguf(folder):
        return _sources_in(folder, settings.get("chat_template"))
    own = _read_own(folder / OWN_FILE)
    if own is not None:
        found = {"default": own}
    else:
        path, source = folder / "tokenizer_config.json", settings.get("chat_template")
        if source in (None, "", []):
            path = folder / "chat_template.json"
            try:
                source = read_json(path).get("chat_template")
            except FileNotFoundError:
                source = None
        found = _sources_in(path, source)
    paths = sorted((folder / FURTHER_FOLDER).glob("*.jinja"))[:_MAX_TEMPLATES]
    return found | {path.stem: source for path in paths if (source := _read_own(path)) is not None}


def _sources_in(path: Path, source: Any) -> dict[str, str]:
    """Return the templates by name in the setting `chat_template` of a file."""
    if source in (None, "", []):
        return {}
    found = {}
    entries = source if isinstance(source, list) else [{"name": "default", "template": source}]
    for entry in entries:
        name, text = map(entry.get, ("name", "template")) if isinstance(entry, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(
                f"{path}: chat_template must be a text, or a list of objects with the texts name "
                f"and template, got {shown(source)}. Download it again."
            )
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ValueError(too_long(path))
        found[name] = text
    return found


def _read_own(path: Path) -> str | None:
    """Read the text of a template; None if there is no such file."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_TEMPLATE_BYTES:
            raise ValueError(too_long(path))
        content = bytearray(size)
        fill(file, memoryview(content))
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8 text, and byte {error.start} is not. Download it again."
        ) from error


def too_long(path: Path | str) -> str:
    """Return the error message for a template that is too long."""
    return (
        f"{path}: a chat template must have at most {MAX_TEMPLATE_BYTES:,} bytes, and this one "
        "has more. Download it again."
    )
