"""The first and the last tokens of a long text, from the part that holds them: always the same."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.text import text_cuts, tokenizer
from jaxspec.text.text_cuts import TextCuts
from jaxspec.text.tokenizer import Tokenizer

PARTS = [
    *("hello", "World", "a", "Z", "12345", "don't", "I'll", "é", "日本語", "e\u0301", "x_y", "¨"),
    *(" ", " ", " ", "  ", "\n", "\n\n", " \n ", "\t", "\r\n", "\u3000", ".", "...", "!?", "-"),
    *("<|endoftext|>", "def f(x):\n    return x\n", "a" * 300, " " * 100, "9" * 200, "-\n" * 50),
]


def texts():
    rng = random.Random(0)
    drawn = ["".join(rng.choices(PARTS, k=400)) for _ in range(2)]
    alike = ["a" * 1000, " " * 1000, "\n" * 1000, "a\n" * 500]
    return drawn + alike + ["ab cd\n" * 200 + "x" * 2000 + " ab cd\n" * 200]


@pytest.fixture
def reads_parts(monkeypatch):
    """Texts count as long from 512 characters on, and places are looked for in as many."""
    monkeypatch.setattr(tokenizer, "_LONG_TEXT", 512)
    monkeypatch.setattr(tokenizer, "_GUESSED_LENGTH", 1)
    monkeypatch.setattr(text_cuts, "_SEARCHED", 512)


def check(found):
    for text in texts():
        for special in (True, False):
            whole = found.encode(text, special)
            for count in (1, 60, len(whole)):
                assert found.encode_last(text, count, special) == whole[-count:]
                assert found.encode_first(text, count, special) == whole[:count]


def with_tokenizer(inner):
    made = Tokenizer(EMBEDDED_MODEL)
    made._tokenizer, made._cuts = inner, TextCuts(inner)
    return made


def embedded(**parts):
    inner = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    for name, part in parts.items():
        setattr(inner, name, part)
    return inner


def sequence(*steps):
    return pre_tokenizers.Sequence(list(steps))


def split(pattern, behavior="isolated"):
    return pre_tokenizers.Split(Regex(pattern), behavior)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDS = processors.TemplateProcessing(
    single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
)
PUBLISHED = {
    "Qwen": {},
    "Qwen with NFC": {"normalizer": normalizers.NFC()},
    "Llama 3": {"pre_tokenizer": sequence(split(CL100K), BYTES)},
    "GPT-2": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
    "digits": {"pre_tokenizer": sequence(pre_tokenizers.Digits(True), split(CL100K), BYTES)},
    "BOS and EOS": {"post_processor": ENDS},
    "a prefix space": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
}
NEVER_CUT = {
    "no words": {"pre_tokenizer": BYTES},
    "words of two": {"pre_tokenizer": sequence(split(r"\w+\s+\w+|\s+|."), BYTES)},
    "looks back": {"pre_tokenizer": sequence(split(r"(?<=[a-z])\s| \S+|\S+|\s+"), BYTES)},
    "a beginning": {"normalizer": normalizers.Prepend("_")},
    "stripped": {"normalizer": normalizers.Strip()},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rules_of_published_models_are_cut_and_their_tokens_stay(name, reads_parts):
    inner = embedded(**PUBLISHED[name])
    assert next(TextCuts(inner).ends("ab cd\n" * 1000, 600)) != "ab cd\n" * 1000
    check(with_tokenizer(inner))


@pytest.mark.parametrize("name", NEVER_CUT)
def test_texts_without_a_safe_cut_are_read_whole(name, reads_parts):
    inner = embedded(**NEVER_CUT[name])
    for text in ("ab cd\n" * 1000, "ab " * 1000):
        assert list(TextCuts(inner).ends(text, 600)) == [text]
        assert list(TextCuts(inner).beginnings(text, 600)) == [text]
    check(with_tokenizer(inner))


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("hello World"),
        AddedToken("World", rstrip=True),
        AddedToken(" World", single_word=True),
        AddedToken("a\n"),
        AddedToken("World", lstrip=True),
        AddedToken("World", single_word=True),
    ],
)
def test_added_tokens_are_not_cut(token, reads_parts):
    inner = embedded()
    inner.add_tokens([token])
    check(with_tokenizer(inner))


def test_sentencepiece_s_words_are_cut_before_spaces_alone(reads_parts):
    marked = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    vocabulary = {"<unk>": 0} | {c: n for n, c in enumerate("▁abcdexyzHWorl\n19", 1)}
    merges = [("▁", "a"), ("a", "b")]
    vocabulary |= {"▁a": 100, "ab": 101}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = marked
    assert next(TextCuts(inner).ends("ab cd\n" * 1000, 600)).startswith(" ")
    check(with_tokenizer(inner))


def test_no_more_is_read_than_the_tokens_need(monkeypatch):
    found, read = Tokenizer(EMBEDDED_MODEL), []
    encode = found.encode
    monkeypatch.setattr(
        found, "encode", lambda text, *a: read.append(len(text)) or encode(text, *a)
    )
    text = "Once upon a time, in 1984,\nthere was " * 300_000
    last, first = found.encode_last(text, 100), found.encode_first(text, 100)
    assert len(last) == len(first) == 100 and sum(read) < len(text) / 50
