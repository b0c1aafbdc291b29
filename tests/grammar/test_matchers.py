"""The factory of matchers: one vocabulary, compiled grammars kept, matchers apart."""

import json
import shutil
import threading

import numpy as np
import pytest
import tokenizers
from constrained import EOS, VOCAB, allowed, embedded, grammar_of, masks_of
from gguf_tokenizers import write_byte_level
from tokenizer_folders import BYTES, FIXTURES

from benchmarks.measure.words import write_words
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.grammar import Grammar, Matchers, fill_masks
from jaxspec.grammar import matchers as module
from jaxspec.text.tokenizer import Tokenizer


def test_matchers_of_one_grammar_move_apart():
    factory = Matchers(embedded(), VOCAB, EOS)
    one, two = (factory.matcher(grammar_of({"choice": ["ab", "ba"]})) for _ in range(2))
    before = masks_of(two)
    one.advance(embedded().encode("a", add_special_tokens=False))
    np.testing.assert_array_equal(masks_of(two), before)
    assert (masks_of(one) != before).any()


def test_the_vocabulary_is_read_once(monkeypatch):
    factory, reads = Matchers(embedded(), VOCAB, EOS), []
    read = factory._make_vocabulary
    monkeypatch.setattr(factory, "_make_vocabulary", lambda: reads.append(1) or read())
    factory.start()
    grammars = [grammar_of({"regex": f"a{i}+"}) for i in range(8)]
    threads = [threading.Thread(target=factory.matcher, args=[each]) for each in grammars * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1 and len(factory._compiled) == 8


def test_a_grammar_is_compiled_once_and_few_are_kept(monkeypatch):
    monkeypatch.setattr(module, "_CACHED", 3)
    factory, compiled = Matchers(embedded(), VOCAB, EOS), []
    compile = factory._compile
    monkeypatch.setattr(factory, "_compile", lambda source: compiled.append(1) or compile(source))
    for _ in range(2):
        for number in range(3):
            factory.matcher(grammar_of({"regex": f"b{number}"}))
    assert len(compiled) == 3
    factory.matcher(grammar_of({"regex": "c"}))
    factory.matcher(grammar_of({"regex": "b0"}))
    assert len(compiled) == 5 and len(factory._compiled) == 3


def test_a_grammar_that_allows_nothing_is_refused_each_time():
    factory = Matchers(embedded(), VOCAB, EOS)
    nothing = grammar_of({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}})
    for _ in range(2):
        with pytest.raises(ValueError, match="structured_outputs"):
            factory.matcher(nothing)


@pytest.mark.parametrize(
    ("tokenizer", "size", "ends"),
    [
        (None, VOCAB, EOS),
        ("embedded", 1000, EOS),
        ("embedded", VOCAB, ()),
        ("embedded", VOCAB, [VOCAB - 1]),
    ],
)
def test_models_without_a_fitting_tokenizer_are_refused(tokenizer, size, ends):
    factory = Matchers(embedded() if tokenizer else None, size, ends)
    with pytest.raises(ValueError, match="structured_outputs"):
        factory.matcher(grammar_of({"choice": ["a"]}))


def test_a_limit_alone_needs_no_vocabulary():
    matcher = Matchers(None, 40, ()).matcher(Grammar(None))
    matcher.advance([3, 4])
    masks = np.zeros((1, 2, 2), np.int32)
    fill_masks([matcher], [[5]], masks)
    assert allowed(masks[0, 0]).tolist() == allowed(masks[0, 1]).tolist() == [*range(40)]


def sentencepiece(folder, name):
    shutil.copy(FIXTURES / "sentencepiece" / f"{name}.model", folder / "tokenizer.model")
    return Tokenizer(folder)


def gguf(folder):
    made = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    write_byte_level(folder / "a.gguf", made, **{"tokenizer.ggml.eos_token_id": 0})
    return Tokenizer(folder / "a.gguf")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "gguf", "bytes"])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_tokens_of_all_kinds_are_their_bytes(kind, is_greedy, tmp_path):
    if kind in ("bpe", "unigram"):
        tokenizer = sentencepiece(tmp_path, kind)
    else:
        tokenizer = gguf(tmp_path) if kind == "gguf" else Tokenizer(BYTES)
    size = 32 * (len(tokenizer) // 32 + 2)
    texts = ["Hello world", "lo 你", "Hello  there"]
    grammar = grammar_of({"choice": texts}, prompt="</think>", tokenizer=tokenizer)
    matcher = Matchers(tokenizer, size, tokenizer.eos_ids).matcher(grammar)
    text, masks = b"", np.zeros((1, 1, size // 32), np.int32)
    while True:
        fill_masks([matcher], [[]], masks)
        token = int(allowed(masks[0, 0])[-1 if is_greedy else 0])
        matcher.advance([token])
        if token in tokenizer.eos_ids:
            break
        text += tokenizer.bytes_of(token)
    assert text.replace(b" ", b"").decode() in [each.replace(" ", "") for each in texts]


def test_a_tokenizer_that_cannot_spell_the_tags_of_reasoning_has_grammars(tmp_path):
    write_words(tmp_path, VOCAB)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    texts = content["model"]["vocab"]
    content["model"]["vocab"] = {text: id for text, id in texts.items() if text[-1] != "<"}
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    assert "<" not in tokenizer.decode(tokenizer.encode("</think>", add_special_tokens=False))
    matchers = Matchers(tokenizer, VOCAB, [5])
    grammar = grammar_of({"regex": "( [ab]){2}"}, tokenizer=tokenizer)
    assert matchers.automaton(grammar).after([0, 1, 5]) > 0
