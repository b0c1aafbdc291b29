"""Masks of free text: which tokens reasoning may have, by what is spelled already."""

import pytest
from constrained import EOS, MARKS, VOCAB, allowed, thinking_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.grammar.free_text import AnyTokens, Thoughts, bit_of, is_allowed, mask_of
from jaxspec.grammar.thinking import Reasoning


@given(ids=st.sets(st.integers(0, 99)), other=st.integers(0, 99))
def test_masks_have_a_bit_per_id(ids, other):
    mask = mask_of(ids, 100)
    assert set(allowed(mask)) == ids and mask.size == 4
    assert is_allowed(other, mask) == (other in ids)
    assert allowed(bit_of(other).reshape(1)).tolist() == [other % 32]


def test_any_tokens_are_all_of_the_vocabulary():
    assert allowed(AnyTokens(77).mask(Reasoning("after"))).tolist() == [*range(77)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return thinking_tokenizer(tmp_path_factory.mktemp("thoughts"), marks=MARKS)


@pytest.mark.parametrize(
    "text", ["", "a", "<", "a</", "<</t", "</thin", "</think", "</think ", "k"]
)
def test_reasoning_is_text_that_does_not_spell_its_end(text, tokenizer):
    end, special = tokenizer.convert_tokens_to_ids("</think>"), tokenizer.special_tokens.values()
    thoughts = Thoughts(tokenizer, VOCAB, end, EOS)
    ids = {*allowed(thoughts.mask(Reasoning("inside", text.encode()[-7:])))}
    for token in range(VOCAB):
        own = tokenizer.bytes_of(token) if token < len(tokenizer) else b""
        is_text = own and token not in special and token not in EOS
        spells = b"</think>" in text.encode() + own
        assert (token in ids) == (token == end or bool(is_text and not spells)), own
