"""Pre-tokenizers: how text is split before byte-pair merges, by llama.cpp's names."""

from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

# Regular expressions from the tokenizer.json of the models that gave the names.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_EXPRESSIONS = {
    "dbrx": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "smaug-bpe": _LLAMA3,
    "tekken": _TEKKEN,
}
_GPT2 = ("default", "gpt-2")  # older files have only "default"
_DIGIT_BY_DIGIT = ("refact", "smollm", "starcoder")  # otherwise like GPT-2
_COMPOSED = ("qwen2", "qwen35")  # apply NFC normalisation first
# llama.cpp skips merges for words that are tokens, and prepends BOS by default.
_WHOLE_WORDS = ("falcon-h1", "lfm2", "llama-bpe", "llama-v3", "llama3", "tekken")

NAMES = tuple(sorted([*_EXPRESSIONS, *_GPT2, *_DIGIT_BY_DIGIT]))
"""Supported values of `tokenizer.ggml.pre`."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of a name in `NAMES`."""
    if name in _GPT2:
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGIT_BY_DIGIT:
        digits = Digits(individual_digits=True)
        return Sequence([digits, ByteLevel(add_prefix_space=False, use_regex=True)])
    split = Split(Regex(_EXPRESSIONS[name]), behavior="isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def normalizer(name: str) -> normalizers.Normalizer | None:
    """Return the normalizer of a name in `NAMES`; None if there is none."""
    return normalizers.NFC() if name in _COMPOSED else None


def merges_whole_words(name: str) -> bool:
    """Return whether merges are skipped for a piece that is a token."""
    return name in _WHOLE_WORDS


def begins_by_default(name: str) -> bool:
    """Return whether a text begins with BOS unless the metadata says otherwise."""
    return name in _WHOLE_WORDS
