"""Rounds of a tile's tokens: the tokens of a slot in order, others at once."""

import jax.numpy as jnp
import pytest

from jaxspec.models.layers import token_rounds
from jaxspec.models.layers.token_rounds import TokenRounds
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.regions import TokenRegion

SLOTS = [3, 3, 3, 5, 7, 7, 0]


def step(slots):
    slots = jnp.array(slots, jnp.int32)
    zeros, live = jnp.zeros_like(slots), slots > 0
    region = TokenRegion(slots, zeros, live.astype(jnp.int32), zeros, zeros, zeros)
    return ModelInputs(
        tokens=slots,
        positions=jnp.arange(len(slots), dtype=jnp.int32),
        kv_slots=zeros,
        live=live,
        page_tables=jnp.zeros((8, 1), jnp.int32),
        decode=region,
        prefill=None,
        width=1,
    )


def members(found):
    return [found.members(jnp.int32(number)).tolist() for number in range(int(found.count))]


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(token_rounds, "mixes_one_token", lambda: False)


def test_on_a_cpu_each_live_token_has_its_round():
    assert members(TokenRounds.of(step(SLOTS), in_order=True)) == [[0], [1], [2], [3], [4], [5]]


def test_elsewhere_tokens_of_a_slot_follow_each_other(at_once):
    assert members(TokenRounds.of(step(SLOTS), in_order=True)) == [
        [0, 7, 7, 3, 4, 7, 7],
        [7, 1, 7, 7, 7, 5, 7],
        [7, 7, 2, 7, 7, 7, 7],
    ]


def test_elsewhere_mixers_without_a_recurrence_have_one_round(at_once):
    assert members(TokenRounds.of(step(SLOTS), in_order=False)) == [[0, 1, 2, 3, 4, 5, 7]]
    assert members(TokenRounds.of(step([0, 0]), in_order=True)) == []


def test_rows_past_the_tokens_are_padding():
    some = step(SLOTS).of_tokens(jnp.array([4, 7], jnp.int32))
    assert some.live.tolist() == [True, False]
    assert some.decode.slots.tolist() == [7, 0]
    assert some.decode.query_len.tolist() == [1, 0]
    assert some.kv_slots.tolist() == [0, -1]
