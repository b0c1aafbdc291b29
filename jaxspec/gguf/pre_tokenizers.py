"""How a text is cut before byte-pair merges, by the name that llama.cpp gives each way."""

from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

# The expressions of the models that the names come from, as their tokenizer.json has them.
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
_GPT2 = ("default", "gpt-2")  # older files do not say more than the first
_DIGIT_BY_DIGIT = ("refact", "smollm", "starcoder")  # and else as GPT-2
_COMPOSED = ("qwen2", "qwen35")  # whose texts are normalised first
# llama.cpp takes a whole word that is a token as it is, and begins a text with the BOS token.
_WHOLE_WORDS = ("falcon-h1", "lfm2", "llama-bpe", "llama-v3", "llama3", "tekken")

NAMES = tuple(sorted([*_EXPRESSIONS, *_GPT2, *_DIGIT_BY_DIGIT]))
"""The names, as `tokenizer.ggml.pre` has them."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """How the tokenizer of a name in `NAMES` cuts a text."""
    if name in _GPT2:
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGIT_BY_DIGIT:
        digits = Digits(individual_digits=True)
        return Sequence([digits, ByteLevel(add_prefix_space=False, use_regex=True)])
    split = Split(Regex(_EXPRESSIONS[name]), behavior="isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def normalizer(name: str) -> normalizers.Normalizer | None:
    """What it makes of a text before; None: it leaves it as it is."""
    return normalizers.NFC() if name in _COMPOSED else None


def merges_whole_words(name: str) -> bool:
    """Whether merges are passed over for a piece that is a token as it is."""
    return name in _WHOLE_WORDS


def begins_by_default(name: str) -> bool:
    """Whether a text begins with the BOS token where the metadata does not say."""
    return name in _WHOLE_WORDS
