"""Ids against the vocabulary, and texts that must not come as ids."""

import pytest

from jaxspec.api.inputs import bad_word_ids, check_biases, check_ids
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

SPACED = {"no": (7,), " no": (8,), "not so": (7, 9), " not so": (8, 9), "a": (1,), " a": (2, 1)}


class Words:
    """A tokenizer of some texts."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return SPACED.get(text, [3] * len(text))


def test_a_word_is_forbidden_at_the_beginning_of_a_text_and_in_it():
    """Where the space is a token of its own, the word's ids alone tell both."""
    assert bad_word_ids(["no", " not so", "a"], Words(), 10) == ((7,), (8,), (7, 9), (8, 9), (1,))


def test_a_tokenizer_of_a_checkpoint_is_asked_without_special_tokens():
    tokenizer = Tokenizer(EMBEDDED_MODEL)
    (first, *_) = bad_word_ids(["return"], tokenizer, 10**6)
    assert tokenizer.decode(first) == "return"


@pytest.mark.parametrize(
    ("word", "message"),
    [("x" * 40, "must have 1 to 32 tokens, and 'xxx.*' has 40. Give a shorter part"),
     ("no", "Token ids must be 0 to 6 with this model, and bad_words has 7")],
)  # fmt: skip
def test_a_word_that_can_not_be_matched_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        bad_word_ids([word], Words(), 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {10: 1}}, "must be 0 to 9 with this model, and logit_bias has 10"),
        ({"logit_bias": {-1: 1}}, "and logit_bias has -1"),
        ({"allowed_token_ids": [3, 10, 11]}, "and allowed_token_ids has 10, 11"),
        ({"allowed_token_ids": [1, 2], "min_tokens": 1}, "id that ends no request while min_tok"),
    ],
)
def test_biases_and_allowed_ids_are_held_against_the_model(changes, message):
    with pytest.raises(ValueError, match=message):
        check_biases(SamplingParams(**changes), (1, 2, 3), 10)


def test_more_biases_than_there_is_room_for_are_refused():
    params = SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(ValueError, match="at most 1,024 entries, got 1,025. Name what may come"):
        check_biases(params, (), 2000)


def test_what_can_be_said_is_taken():
    check_biases(SamplingParams(allowed_token_ids=[1, 4], min_tokens=1), (1, 2), 10)
    check_biases(SamplingParams(allowed_token_ids=[1], min_tokens=0), (1, 2), 10)
    check_ids("ids", [0, 9], 10)
