"""The plan that brings a request's tables to the device."""

import numpy as np
import pytest

from jaxspec.plan.plan import TABLES, plan_layout
from jaxspec.plan.table_plan import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MORE_STOP_IDS,
    pack_tables,
    table_layout,
)
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams

VOCAB = 70


def fields(stop_ids=(), words=(), **params):
    request = Request((1,), SamplingParams(**params), 0, stop_ids, bad_words=words)
    request.slot = 3
    return table_layout(VOCAB).unpack(pack_tables(request, VOCAB))


@pytest.mark.parametrize(
    ("num_computed", "recent"),
    [
        (0, [-1, -1, -1, -1]),
        (2, [10, 11, -1, -1]),
        (4, [10, 11, 12, 13]),
        (7, [14, 20, 21, 13]),  # after a preemption, of which output is cached, too
    ],
)
def test_the_newest_tokens_are_those_that_are_computed(num_computed, recent):
    request = Request((10, 11, 12, 13, 14), SamplingParams(), 0)
    request.tokens += (20, 21, 22)
    request.slot, request.num_computed = 2, num_computed
    plan = table_layout(VOCAB, 4).unpack(pack_tables(request, VOCAB, 4))
    assert plan["recent"].tolist() == recent


@pytest.mark.parametrize("allowed", [[0], [31, 32, 63, 64, 69], list(range(VOCAB)), [5, 5]])
def test_there_is_a_bit_for_each_id_that_may_come(allowed):
    words = fields(allowed_token_ids=allowed)["allowed"]
    bits = [token for token in range(VOCAB) if words[token // 32] >> (token % 32) & 1]
    assert bits == sorted(set(allowed))


def test_what_is_not_asked_for_is_neutral():
    plan = fields()
    assert plan["slot"] == 3 and (plan["allowed"] == -1).all()
    for name in ("bias_ids", "bad_words", "more_stop_ids", "recent"):
        assert (plan[name] == -1).all()


def test_as_much_as_may_be_asked_for_has_room():
    biases = {token: token / 7 for token in range(MAX_BIASES)}
    words = tuple((token,) * (1 + token % 32) for token in range(MAX_BAD_WORDS))
    plan = fields(tuple(range(16 + MORE_STOP_IDS)), words, logit_bias=biases)
    assert plan["bias_ids"].tolist() == list(biases)
    np.testing.assert_array_equal(plan["biases"], np.float32(list(biases.values())))
    assert plan["more_stop_ids"].tolist() == list(range(16, 16 + MORE_STOP_IDS))
    assert [tuple(word[word >= 0]) for word in plan["bad_words"]] == list(words)
    assert (plan["bad_words"][0, :-1] == -1).all()  # behind its padding


def test_no_other_plan_has_room_for_it():
    from fake_device import make_buckets

    shapes = make_buckets(vocab_size=VOCAB)
    assert plan_layout(TABLES, shapes) is table_layout(VOCAB, shapes.recent_tokens)
