"""Pre-tokenizers: where a text is cut is as the published tokenizer.json files cut it."""

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from jaxspec.gguf import pre_tokenizers

# As these models' tokenizer.json files have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(expression):
    cut = Split(Regex(expression), "isolated")
    return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = ByteLevel(add_prefix_space=False)
PUBLISHED = {
    "gpt-2": GPT2,
    "default": GPT2,
    "smollm": Sequence([Digits(individual_digits=True), GPT2]),
    "llama-bpe": split(LLAMA3),
    "lfm2": split(LLAMA3),
    "qwen2": split(QWEN3),
    "qwen35": split(QWEN35),
}
TEXTS = [
    "Hello world, it's 12345 o'clock; WE'LL see.",
    "def f(x):\n\treturn x ** 2  # squared\n\n\n    y = f(10)",
    "  leading and   inner and trailing   ",
    "naïve café, e\u0301 क्षि 漢字かな 한국어 ١٢٣ ½ 🙂🙂\u200d",
    "\r\n\r\n a\r\n1.5e-3/2==0.00075 <|x|> $$ ...!?",
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_pieces_are_those_of_the_published_tokenizer(name):
    own = pre_tokenizers.pre_tokenizer(name)
    for text in TEXTS:
        expected = PUBLISHED[name].pre_tokenize_str(text)
        assert own.pre_tokenize_str(text) == expected and len(expected) > 3


@pytest.mark.parametrize("name", pre_tokenizers.NAMES)
def test_no_character_is_lost(name):
    for text in TEXTS:
        pieces = pre_tokenizers.pre_tokenizer(name).pre_tokenize_str(text)
        ends = [0, *(end for _, (_, end) in pieces)]
        assert [begin for _, (begin, _) in pieces] == ends[:-1] and ends[-1] == len(text)


def test_only_qwen_composes_characters_and_some_keep_whole_words():
    composing = [n for n in pre_tokenizers.NAMES if pre_tokenizers.normalizer(n) is not None]
    assert composing == ["qwen2", "qwen35"]
    keeping = [n for n in pre_tokenizers.NAMES if pre_tokenizers.merges_whole_words(n)]
    assert keeping == ["falcon-h1", "lfm2", "llama-bpe", "llama-v3", "llama3", "tekken"]
    assert [n for n in pre_tokenizers.NAMES if pre_tokenizers.begins_by_default(n)] == keeping
