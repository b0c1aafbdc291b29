"""Build a `tokenizers.Tokenizer` from a GGUF file's metadata."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from jaxspec.checks import shown
from jaxspec.gguf import pre_tokenizers
from jaxspec.gguf.file import GGUFFile
from jaxspec.gguf.sentence_piece import add_ends, mark_spaces, merges_by_score
from jaxspec.gguf.vocabulary import PREFIX, Vocabulary

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and settings as in a tokenizer_config.json (`Vocabulary.settings`).

    Raises:
        FileNotFoundError: The file does not exist, or its metadata has no tokenizer.
        ValueError: As `GGUFFile` and `Vocabulary`, or the type of tokenizer is not supported.
        Exception: The library `tokenizers` rejects the vocabulary.
    """
    with GGUFFile(path) as file:
        model = file.metadata.get(PREFIX + "model")
        if model in (None, "none", "no_vocab"):
            raise FileNotFoundError(
                f"Text needs a tokenizer, but the metadata of {path} has none. Pass token ids, "
                '{"prompt_token_ids": [...]}, or name a tokenizer with the option `tokenizer`.'
            )
        vocabulary = Vocabulary(file)
    if not isinstance(model, str) or model not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise vocabulary.broken("model", f"must be one of {known}, got {shown(model)}")
    tokenizer = _KINDS[model](vocabulary)
    for is_special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        marked = [vocabulary.tokens[index] for index in (vocabulary.types == kind).nonzero()[0]]
        added = [AddedToken(token, special=is_special, normalized=False) for token in marked]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
    return tokenizer, vocabulary.settings()


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the id of each token, except of unused ones that only pad the vocabulary."""
    kinds = zip(vocabulary.tokens, vocabulary.types.tolist(), strict=True)
    return {token: index for index, (token, kind) in enumerate(kinds) if kind != _UNUSED}


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Make a tokenizer of GPT-2's type: merges of bytes, which are written as characters."""
    pre = vocabulary.find("pre", str) or "default"
    if pre not in pre_tokenizers.NAMES:
        known = ", ".join(pre_tokenizers.NAMES)
        raise vocabulary.broken("pre", f"must be one of {known}, got {shown(pre)}")
    merges = [_pair(vocabulary, merge) for merge in vocabulary.need("merges", list)]
    whole = pre_tokenizers.merges_whole_words(pre)
    model = models.BPE(vocab=_ids(vocabulary), merges=merges, ignore_merges=whole)
    tokenizer = tokenizers.Tokenizer(model)
    if (normalizer := pre_tokenizers.normalizer(pre)) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, vocabulary, begins=pre_tokenizers.begins_by_default(pre))
    return tokenizer


def _pair(vocabulary: Vocabulary, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise vocabulary.broken("merges", f"must be pairs of tokens, got {shown(merge)}")
    return left, right


def _sentence_piece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Make a tokenizer of Llama 2's type: characters and bytes, merged by the result's score."""
    scores = vocabulary.for_each_token("scores")
    if scores is None:
        raise vocabulary.broken("scores", "must hold a number for each token, and is absent")
    ids = _ids(vocabulary)
    try:
        ranked = merges_by_score(ids, scores.tolist())
    except ValueError as error:
        raise vocabulary.broken("tokens", str(error)) from error
    model = models.BPE(
        vocab=ids,
        merges=ranked,
        unk_token=vocabulary.role("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    begins_with_space = vocabulary.find("add_space_prefix", bool) is not False
    mark_spaces(tokenizer, begins_with_space=begins_with_space)
    _add_ends(tokenizer, vocabulary, begins=True)
    return tokenizer


def _add_ends(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary, *, begins: bool) -> None:
    """Make the tokenizer add BOS and EOS as the metadata says; `begins` is the default for BOS."""
    asked = vocabulary.find("add_bos_token", bool)
    first = vocabulary.role("bos_token") if (begins if asked is None else asked) else None
    last = vocabulary.role("eos_token") if vocabulary.find("add_eos_token", bool) else None
    add_ends(tokenizer, first, last)


_KINDS = {"gpt2": _byte_level, "llama": _sentence_piece}
