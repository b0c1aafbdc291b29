"""read_tokenizer: ids and texts are those of the tokenizer that the file was made of."""

import numpy as np
import pytest
import tokenizers
from gguf import TokenType
from gguf_tokenizers import CONTROL, NORMAL, USER, write_byte_level, write_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from jaxspec.gguf import pre_tokenizers as table
from jaxspec.gguf.tokenizer import read_tokenizer
from jaxspec.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over 123 lazy dogs; it's 45 o'clock\n\n  and then",
    "naïve café",
]
TEXTS = [
    *CORPUS,
    "  over the  dogs\t<eot> quick<think>fox 2024 漢字 🙂",
    "e\u0301 <bos>the <unknown> brownfox",
    "",
]


def trained(name, **options):
    """A byte-level tokenizer that cuts texts as those of that name do."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = table.pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    if (normalizer := table.normalizer(name)) is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<bos>", normalized=False, special=True)])
    tokenizer.add_special_tokens([AddedToken("<eot>", normalized=False, special=True)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("name", table.NAMES)
def test_a_byte_level_tokenizer_comes_back(name, tmp_path):
    expected = trained(name, ignore_merges=table.merges_whole_words(name))
    path = write_byte_level(tmp_path / "x.gguf", expected, pre=name)
    found, _ = read_tokenizer(path)
    assert found.get_vocab() == expected.get_vocab()
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids
        for skip in (True, False):
            kept = found.decode(ids, skip_special_tokens=skip)
            assert kept == expected.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("pre", "entries", "around"),
    [
        ("qwen2", {}, (0, 0)),
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"add_bos_token": False}, (0, 0)),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, (1, 1)),
        ("qwen2", {"add_eos_token": True}, (0, 1)),
    ],
)
def test_a_text_begins_and_ends_as_the_metadata_says(pre, entries, around, tmp_path):
    expected = trained(pre)
    bos, eot = map(expected.token_to_id, ("<bos>", "<eot>"))
    entries |= {"pre": pre, "bos_token_id": bos, "eos_token_id": eot}
    tokenizer = Tokenizer(write_byte_level(tmp_path / "x.gguf", expected, **entries))
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    begin, end = around
    assert tokenizer.encode("the fox") == [bos] * begin + plain + [eot] * end
    assert (
        tokenizer.eos_ids == (eot,) and tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    )


def test_tokens_that_only_fill_up_stand_for_nothing(tmp_path):
    expected = trained("qwen2")
    path = write_byte_level(tmp_path / "x.gguf", expected, pre="qwen2")
    tokens = sorted(expected.get_vocab(), key=expected.get_vocab().__getitem__)
    padding = ["[PAD1]", "[PAD2]"]
    merges = read_merges(path)
    kinds = [*[NORMAL] * len(tokens), *[TokenType.UNUSED] * 2]
    path = write_tokenizer(
        tmp_path / "y.gguf", "gpt2", [*tokens, *padding], kinds, pre="qwen2", merges=merges
    )
    found, _ = read_tokenizer(path)
    assert found.decode([len(tokens), len(tokens) + 1]) == ""
    assert found.token_to_id("[PAD1]") is None


def read_merges(path):
    from jaxspec.gguf.file import GGUFFile

    with GGUFFile(path) as file:
        return file.metadata["tokenizer.ggml.merges"]


# SentencePiece's: tokens with scores, of which the likeliest pair is merged first.
BLOCK_COPIES = [
    "▁t",
    "he",
    "▁the",
    "in",
    "▁in",
    "ing",
    "▁q",
    "ui",
    "qui",
    "ck",
    "▁quick",
    "▁▁",
    "uick",
]


def pieces():
    """Tokens, their types and scores, in SentencePiece's order."""
    letters = sorted(set("▁thequickingbrown.") - {"z"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, CONTROL, CONTROL, *[TokenType.BYTE] * 256]
    scores = [0.0] * len(tokens)
    tokens += BLOCK_COPIES + letters + ["<extra>"]
    kinds += [NORMAL] * (len(BLOCK_COPIES) + len(letters)) + [USER]
    scores += [-float(i) for i in range(len(BLOCK_COPIES))] + [-100.0] * len(letters) + [0.0]
    return tokens, kinds, scores


def sentencepiece(text, tokens, scores):
    """SentencePiece's BPE, slowly: merge the pair of the best token until none is left."""
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list(text)
    while True:
        pairs = [
            (-scores[ids[a + b]], i)
            for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in ids
        ]
        if not pairs:
            break
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    found = []
    for part in parts:
        known = part in ids
        found += [ids[part]] if known else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("begins_with_space", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_scores(begins_with_space, tmp_path):
    tokens, kinds, scores = pieces()
    path = write_tokenizer(
        tmp_path / "x.gguf", "llama", tokens, kinds, scores=scores, bos_token_id=1, eos_token_id=2,
        unknown_token_id=0, add_space_prefix=begins_with_space,
    )  # fmt: skip
    tokenizer = Tokenizer(path)
    assert tokenizer.has_byte_tokens and tokenizer.eos_ids == (2,)
    for text in ("the quick thing", " in  the  inn", "quiz é 漢 in", "ninquick."):
        plain = sentencepiece("▁" * begins_with_space + text.replace(" ", "▁"), tokens, scores)
        ids = tokenizer.encode(text)
        assert ids == [1, *plain]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("the<extra>", add_special_tokens=False)[-1] == len(tokens) - 1


def test_special_tokens_and_templates_are_found(tmp_path):
    path = write_byte_level(
        tmp_path / "x.gguf",
        trained("qwen2"),
        pre="qwen2",
        bos_token_id=trained("qwen2").token_to_id("<bos>"),
        tokenizer__chat_template="{{ bos_token }}{{ messages[0].content }}|",
        tokenizer__chat_template__tool_use="tools: {{ messages[0].content }}",
    )
    tokenizer = Tokenizer(path)
    hello = [{"role": "user", "content": "hello"}]
    assert tokenizer.render_chat(hello) == "<bos>hello|"
    assert tokenizer.render_chat(hello, tools=[{"type": "function"}]) == "tools: hello"
    assert tokenizer.eos_ids == ()


def test_a_file_without_a_template_says_so(tmp_path):
    tokenizer = Tokenizer(write_byte_level(tmp_path / "x.gguf", trained("qwen2"), pre="qwen2"))
    with pytest.raises(ValueError, match=r"x.gguf has none \(.*or a GGUF file's metadata"):
        tokenizer.render_chat([{"role": "user", "content": "hello"}])


def test_a_file_without_a_tokenizer_is_told_from_a_broken_one(tmp_path):
    path = write_tokenizer(tmp_path / "x.gguf", "none", ["a"])
    with pytest.raises(FileNotFoundError, match="the metadata of .* has none"):
        read_tokenizer(path)


TOKENS = ["a", "b", "ab"]


@pytest.mark.parametrize(
    ("entries", "rule"),
    [
        ({"model": "bert"}, "model` must be one of gpt2, llama, got 'bert'"),
        ({"pre": "chameleon"}, "pre` must be one of dbrx, .*, tekken, got 'chameleon'"),
        ({"pre": 3}, "pre` must be a text, got 3"),
        ({"tokens": ["a", "a"]}, "tokens` must hold each token once"),
        ({"types": [1, 1]}, "token_type` must hold a number for each of 3 tokens, got 2 entries"),
        ({"merges": ["ab"]}, "merges` must be pairs of tokens, got 'ab'"),
        ({"merges": [1]}, "merges` must be a list of texts"),
        ({"merges": ["a z"]}, "must hold a tokenizer that `tokenizers` .* Download the file again"),
        ({"bos_token_id": 3}, "bos_token_id` must be one of the tokens 0 to 2, got 3"),
        ({"add_bos_token": "yes"}, "add_bos_token` must be true or false, got 'yes'"),
        ({"model": "llama"}, "scores` must hold a number for each token, and is absent"),
        ({"model": "llama", "scores": [1.0]}, "scores` must hold a number for each of 3 tokens"),
        ({"tokenizer__chat_template": 3}, "chat_template must be a text"),
    ],
)
def test_what_does_not_fit_is_one_error_that_names_it(entries, rule, tmp_path):
    given = {"model": "gpt2", "tokens": TOKENS, "merges": ["a b"], "pre": "gpt-2"} | entries
    path = write_tokenizer(tmp_path / "x.gguf", **given)
    with pytest.raises(ValueError, match=rule) as caught:
        Tokenizer(path)
    message = str(caught.value)
    assert str(path) in message and len(message) < 1000 and "tokenizer.json" not in message


def test_scores_are_numbers_of_any_size(tmp_path):
    """A damaged score gives other ids, never a crash."""
    tokens, kinds, scores = pieces()
    scores[300:] = [float("nan")] * (len(scores) - 300)
    path = write_tokenizer(tmp_path / "x.gguf", "llama", tokens, kinds, scores=scores)
    assert np.isfinite(Tokenizer(path).encode("the quick")).all()
