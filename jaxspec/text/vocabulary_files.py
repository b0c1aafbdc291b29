"""Tokenizers of folders without a tokenizer.json: vocabulary and merges, or SentencePiece.

The rules are those by which transformers converts its tokenizers in Python to fast ones
(huggingface/transformers, convert_slow_tokenizer.py). The contents are untrusted; errors name the
file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from jaxspec.checks import shown
from jaxspec.files import fill, open_file, read_json
from jaxspec.gguf import pre_tokenizers
from jaxspec.gguf.sentence_piece import add_ends, mark_spaces, merges_by_score
from jaxspec.text import piece_file
from jaxspec.text.piece_file import Pieces

VOCABULARY, MERGES, PIECES = "vocab.json", "merges.txt", "tokenizer.model"
MAX_BYTES = 2**26
"""Largest size of a merges.txt or tokenizer.model, over ten times that of published ones."""
_UNREAD = ("tekken.json", "*.tiktoken", "spiece.model", "vocab.txt")
# `tokenizer_class` of tokenizer_config.json -> llama.cpp's name of how texts are split.
_SPLITS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2", "Qwen3_5Tokenizer": "qwen35"}
_OF_MODELS = {"qwen2": "qwen2", "qwen3": "qwen2", "qwen3_5": "qwen35"}  # beginnings of model_type
_OF_PIECES = (None, "LlamaTokenizer", "PreTrainedTokenizer")


def load(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Read the tokenizer of a folder, and the special tokens that its file names.

    Args:
        folder: A checkpoint without a tokenizer.json.
        config: The content of its tokenizer_config.json.

    Raises:
        FileNotFoundError: There are none of the files.
        ValueError: A file is malformed, or of a kind that is not implemented.
        Exception: The library `tokenizers` rejects the vocabulary.
    """
    if os.path.lexists(folder / VOCABULARY) and os.path.lexists(folder / MERGES):
        return _byte_level(folder, config), {}
    if os.path.lexists(folder / PIECES):
        return _sentence_piece(folder, config)
    unread = next((path.name for each in _UNREAD for path in folder.glob(each)), None)
    also = f" It has {unread}, which jaxspec does not read." if unread else ""
    raise FileNotFoundError(
        f"Text needs a tokenizer, but {folder} has no tokenizer.json, nor {VOCABULARY} with "
        f"{MERGES}, nor {PIECES}.{also} Copy the checkpoint's tokenizer.json there, make one with "
        'save_pretrained of transformers, or pass token ids: {"prompt_token_ids": [...]}.'
    )


def _class_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return `tokenizer_class` without "Fast", which says the same; None if there is none."""
    name = config.get("tokenizer_class")
    if name is None:
        return None
    if not isinstance(name, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: `tokenizer_class` must be a string, got "
            f"{shown(name)}. Download it again."
        )
    return name.removesuffix("Fast")


def _unknown(folder: Path, name: str, file: str, known: str) -> ValueError:
    return ValueError(
        f"{folder / 'tokenizer_config.json'}: `tokenizer_class` must be {known} for a folder with "
        f"{file} in place of a tokenizer.json, got {shown(name)}. Make a tokenizer.json with "
        "save_pretrained of transformers, or download the checkpoint's."
    )


def _byte_level(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read merges of bytes, which vocabulary and merges write as characters, like GPT-2's."""
    name = _class_of(folder, config)
    if name is not None and name not in _SPLITS:
        raise _unknown(folder, name, VOCABULARY, " or ".join(_SPLITS))
    pre = _split_of_model(folder) if name is None else _SPLITS[name]
    tokenizer = tokenizers.Tokenizer(models.BPE(_ids(folder), _merges(folder)))
    if (normalizer := pre_tokenizers.normalizer(pre)) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.pre_tokenizer(pre)
    if pre == "gpt-2" and config.get("add_prefix_space") is True:
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_of_model(folder: Path) -> str:
    """Return how a folder's texts are split that names no class: by its model, or as GPT-2's."""
    path = folder / "config.json"
    kind = read_json(path).get("model_type") if os.path.lexists(path) else None
    found = [name for name in _OF_MODELS if isinstance(kind, str) and kind.startswith(name)]
    return _OF_MODELS[max(found, key=len)] if found else "gpt-2"


def _ids(folder: Path) -> dict[str, int]:
    path = folder / VOCABULARY
    ids = read_json(path)
    wrong = next((each for each in ids.items() if type(each[1]) is not int), None)
    if wrong is None:
        wrong = next((each for each in ids.items() if not 0 <= each[1] < 2**31), None)
    if wrong is not None or len(set(ids.values())) < len(ids) or not ids:
        got = "none" if not ids else "an id twice" if wrong is None else _entry(*wrong)
        raise ValueError(
            f"{path} must map each token to an id of its own, got {got}. Download it again."
        )
    return ids


def _entry(token: str, token_id: Any) -> str:
    return f"{shown(token)}: {shown(token_id)}"


def _merges(folder: Path) -> list[tuple[str, str]]:
    path = folder / MERGES
    content = _read(path)
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8 text, and byte {error.start} is not. Download it again."
        ) from error
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise ValueError(
                f"{path}: line {number} must be two tokens and a space between them, got "
                f"{shown(line)}. Download it again."
            )
        merges.append((left, right))
    return merges


def _sentence_piece(
    folder: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Read a SentencePiece model, as transformers reads Llama's."""
    if (name := _class_of(folder, config)) not in _OF_PIECES:
        raise _unknown(folder, str(name), PIECES, " or ".join(filter(None, _OF_PIECES)))
    path = folder / PIECES
    pieces = piece_file.parse(_read(path), path)
    tokenizer = tokenizers.Tokenizer(_model(pieces, path))
    # A file without the setting is of a time before it, and means what it meant then.
    mark_spaces(
        tokenizer,
        begins_with_space=pieces.adds_space and config.get("add_prefix_space") is not False,
        at_the_start_alone=config.get("legacy") is False,
        before=pieces.normalizers(path),
    )
    marked = [AddedToken(text, special=True, normalized=False) for text in pieces.special]
    tokenizer.add_special_tokens(marked)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in pieces.user_defined])
    _add_ends(tokenizer, pieces, config)
    return tokenizer, pieces.roles


def _model(pieces: Pieces, path: Path) -> models.Model:
    ids = pieces.ids
    if pieces.is_unigram:
        scored = list(zip(pieces.texts, pieces.scores, strict=True))
        return models.Unigram(scored, pieces.unknown_id, pieces.has_bytes)
    try:
        merges = merges_by_score(ids, pieces.scores)
    except ValueError as error:
        raise ValueError(f"{path} {error}. Download it again.") from error
    return models.BPE(
        ids,
        merges,
        unk_token=pieces.texts[pieces.unknown_id],
        fuse_unk=True,
        byte_fallback=pieces.has_bytes,
    )


def _add_ends(tokenizer: tokenizers.Tokenizer, pieces: Pieces, config: Mapping[str, Any]) -> None:
    """Add BOS unless the settings say otherwise, and EOS if they do."""
    first = pieces.roles.get("bos_token") if config.get("add_bos_token") is not False else None
    last = pieces.roles.get("eos_token") if config.get("add_eos_token") is True else None
    add_ends(tokenizer, first, last)


def _read(path: Path) -> bytes:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise ValueError(
                f"{path} must have at most {MAX_BYTES:,} bytes, got {size:,}. Download it again."
            )
        content = bytearray(size)
        fill(file, memoryview(content))
    return bytes(content)
