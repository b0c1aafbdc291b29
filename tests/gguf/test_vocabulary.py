"""Vocabulary: entries are of the kind that is asked for, or one error names them."""

import numpy as np
import pytest
from gguf_tokenizers import write_tokenizer

from jaxspec.gguf.file import GGUFFile
from jaxspec.gguf.vocabulary import Vocabulary


def vocabulary_of(tmp_path, **entries):
    with GGUFFile(write_tokenizer(tmp_path / "x.gguf", "gpt2", ["a", "b"], **entries)) as file:
        return Vocabulary(file)


def test_entries_are_found_by_their_kind(tmp_path):
    found = vocabulary_of(tmp_path, pre="x", add_bos_token=True, eos_token_id=1, scores=[0.5, 1.0])
    assert found.tokens == ["a", "b"] and found.types.tolist() == [1, 1]
    assert found.find("pre", str) == "x" and found.find("add_bos_token", bool) is True
    assert found.find("merges", list) is None and found.for_each_token("none") is None
    np.testing.assert_array_equal(found.for_each_token("scores"), [0.5, 1.0])
    assert found.role("eos_token") == "b" and found.role("bos_token") is None
    assert found.settings() == {"eos_token": "b", "chat_template": []}


def test_an_entry_of_another_kind_is_refused(tmp_path):
    found = vocabulary_of(tmp_path, pre=1, eos_token_id=True, scores="x")
    for call, rule in (
        (lambda: found.find("pre", str), "pre` must be a text, got 1"),
        (lambda: found.need("merges", list), "merges` must be a list of texts, and is absent"),
        (lambda: found.role("eos_token"), "eos_token_id` must be an integer, got True"),
        (lambda: found.for_each_token("scores"), "for each of 2 tokens, got 'x'"),
    ):
        with pytest.raises(ValueError, match=rule):
            call()
