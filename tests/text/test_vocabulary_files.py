"""Folders without a tokenizer.json: ids and texts are those of the tokenizer that wrote the files.

`fixtures/sentencepiece` has two models that the package sentencepiece 0.2.3 trained, and the ids
and texts that it made of some texts: `bpe.model` like Llama's, and `unigram.model` with rules of
normalization.
"""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizer_folders import FIXTURES
from tokenizers import decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from jaxspec.gguf import pre_tokenizers
from jaxspec.text.tokenizer import Tokenizer

SENTENCE_PIECE = FIXTURES / "sentencepiece"
REFERENCE = json.loads((SENTENCE_PIECE / "reference.json").read_text())
CORPUS = [
    "the quick brown fox jumps over 123 lazy dogs; it's 45 o'clock\n\n  and then",
    "naïve café",
]
TEXTS = [*CORPUS, "  over the  dogs\t<|call|> quick<|end|>fox 2024 漢字 🙂", "e\u0301 été", ""]
MAX_CHARACTERS = 1000


def trained(pre):
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.pre_tokenizer(pre), decoders.ByteLevel()
    if (normalizer := pre_tokenizers.normalizer(pre)) is not None:
        found.normalizer = normalizer
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(CORPUS * 3, trainer)
    return found


def written(tokenizer, folder, **settings):
    """The tokenizer's vocabulary and merges as the two files, with a tokenizer_config.json."""
    tokenizer.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def with_pieces(folder, name="bpe", **settings):
    shutil.copy(SENTENCE_PIECE / f"{name}.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("pre", "settings", "model_type"),
    [
        ("gpt-2", {"tokenizer_class": "GPT2Tokenizer"}, None),
        ("qwen2", {"tokenizer_class": "Qwen2TokenizerFast"}, "gpt2"),
        ("qwen35", {"tokenizer_class": "Qwen3_5Tokenizer"}, None),
        ("qwen2", {}, "qwen3_next"),
        ("qwen35", {}, "qwen3_5_moe"),
        ("gpt-2", {}, None),
        ("gpt-2", {}, "granitemoehybrid"),
    ],
)
def test_vocabulary_and_merges_are_the_tokenizer_that_wrote_them(
    pre, settings, model_type, tmp_path
):
    expected = trained(pre)
    folder, size = written(expected, tmp_path, **settings), expected.get_vocab_size()
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = Tokenizer(folder)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text).ids
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text).ids)
    assert found.eos_ids == () and not found.has_token("<|end|>")
    added = {"<|call|>": size, "<|end|>": size + 1}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    found, plain = Tokenizer(folder), expected.encode("the ").ids
    assert found.encode("the <|call|>the <|end|>") == [*plain, size, *plain, size + 1]
    assert found.eos_ids == (size + 1,) and found.decode([size, size + 1]) == "<|call|>"


def test_a_space_before_the_first_word_is_added_on_demand(tmp_path):
    expected = trained("gpt-2")
    expected.pre_tokenizer = ByteLevel(add_prefix_space=True)
    folder = written(expected, tmp_path, tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    assert Tokenizer(folder).encode("the fox") == expected.encode("the fox").ids


@pytest.mark.parametrize("name", REFERENCE)
def test_a_sentencepiece_model_gives_the_ids_of_its_own_package(name, tmp_path):
    """But for the space that transformers puts after an added token, unless `legacy` is false."""
    tokenizer = Tokenizer(with_pieces(tmp_path, name))
    assert tokenizer.eos_ids == (2,) and tokenizer.has_byte_tokens
    for case in REFERENCE[name]:
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        if "<call>" not in case["text"]:
            ids = tokenizer.encode(case["text"], add_special_tokens=False)
            assert ids == case["ids"]
            assert tokenizer.encode(case["text"]) == [1, *ids]


def test_the_settings_say_what_is_put_around_a_text(tmp_path):
    case = next(case for case in REFERENCE["bpe"] if "<call>" in case["text"])
    folder = with_pieces(tmp_path, legacy=False, add_bos_token=False, add_eos_token=True)
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 345}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode(case["text"]) == [*case["ids"], 2]
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [345]
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]  # one token, as on the hub


def test_a_sentencepiece_model_that_is_damaged_is_named_or_another(tmp_path):
    folder = with_pieces(tmp_path)
    path = folder / "tokenizer.model"
    content, rng = path.read_bytes(), np.random.default_rng(0)
    read, refused = 0, 0
    for _ in range(600):
        damaged = bytearray(content)
        place = int(rng.integers(len(content)))
        if rng.integers(4):
            damaged[place] ^= 1 << int(rng.integers(8))
        else:
            del damaged[place:]
        path.write_bytes(damaged)
        try:
            read += bool(Tokenizer(folder).encode("the quick brown fox <call>"))
        except (ValueError, FileNotFoundError) as error:
            assert type(error) in (ValueError, FileNotFoundError)
            assert str(folder) in str(error) and len(str(error)) < MAX_CHARACTERS
            refused += 1
    assert read > 50 and refused > 100


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({"vocab.json": "[]"}, "vocab.json must hold a JSON object"),
        ({"vocab.json": "{}"}, "vocab.json must map each token to an id of its own, got none"),
        ({"vocab.json": '{"a": 0, "b": 0}'}, "got an id twice"),
        ({"vocab.json": '{"a": "x"}'}, "got 'a': 'x'"),
        ({"vocab.json": '{"a": -1}'}, "got 'a': -1"),
        ({"vocab.json": '{"a": 99999999999}'}, "got 'a': 99999999999"),
        ({"merges.txt": b"a b\n\xff c"}, "merges.txt must be UTF-8 text, and byte 4 is not"),
        ({"merges.txt": "#version: 0.2\nab"}, "merges.txt: line 2 must be two tokens"),
        ({"merges.txt": "a b c"}, "merges.txt: line 1 must be two tokens"),
        ({"merges.txt": "zz zz"}, "must be one that `tokenizers` runs"),
        ({"tokenizer_config.json": '{"tokenizer_class": 3}'}, "`tokenizer_class` must be a string"),
        ({"tokenizer_config.json": '{"tokenizer_class": "XTok"}'}, "`tokenizer_class` must be GPT"),
        ({"config.json": "["}, "config.json must be JSON"),
    ],
)
def test_a_file_that_is_wrong_is_named(files, rule, tmp_path):
    folder = written(trained("gpt-2"), tmp_path)
    for name, content in files.items():
        content = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rule) as caught:
        Tokenizer(folder)
    assert str(folder) in str(caught.value) and len(str(caught.value)) < MAX_CHARACTERS


@pytest.mark.parametrize("name", ["tekken.json", "qwen.tiktoken", "vocab.txt"])
def test_a_vocabulary_of_another_kind_is_refused_by_name(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(FileNotFoundError, match=f"It has {name}, which jaxspec does not read"):
        Tokenizer(tmp_path)
    with pytest.raises(ValueError, match="`tokenizer_class` must be LlamaTokenizer or"):
        Tokenizer(with_pieces(tmp_path, tokenizer_class="T5Tokenizer"))
