"""The tables of a slot: what a plan writes, and what the newest tokens complete."""

import jax
import numpy as np
import pytest

from jaxspec.plan.table_plan import MAX_BAD_WORD_TOKENS, pack_tables
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling.bias_tables import BiasTables
from jaxspec.sampling.bits import is_set

SLOTS, VOCAB = 4, 70
write = jax.jit(BiasTables.with_slot)


def packed(slot, stop_ids=(), words=(), **params):
    request = Request((1,), SamplingParams(**params), 0, stop_ids, bad_words=words)
    request.slot = slot
    return pack_tables(request, VOCAB)


@pytest.fixture
def empty():
    return BiasTables.empty(SLOTS, VOCAB, 4)


def test_a_plan_writes_its_slot_whole_and_no_other(empty):
    first = packed(2, range(40), ((1, 2),), allowed_token_ids=[0, 69], logit_bias={3: 4.0})
    second = packed(2, range(18), (), logit_bias={5: -1.5, 69: 2.0})
    tables = write(write(empty, first), second)
    want = np.zeros((SLOTS, VOCAB), np.float32)
    want[2, 5], want[2, 69] = -1.5, 2.0
    np.testing.assert_array_equal(tables.bias, want)
    assert tables.more_stop_ids[2, :3].tolist() == [16, 17, -1]
    assert (np.asarray(tables.bad_words) == -1).all()
    tables = write(tables, first)
    every = np.arange(4, dtype=np.int32)
    allowed = is_set(tables.masks_at(np.full_like(every, 2), every), VOCAB)
    assert [np.flatnonzero(row).tolist() for row in allowed] == [[0, 69]] * 4
    assert is_set(tables.masks_at(every % 2, every), VOCAB).all()
    assert tables.bad_words[2, 0, -3:].tolist() == [-1, 1, 2]
    jax.tree.map(np.testing.assert_array_equal, tables, write(tables, np.zeros_like(first)))


def test_masks_replace_the_allowed_ids_of_their_slots_at_each_position(empty):
    random = np.random.default_rng(0)
    masks = random.integers(-(2**31), 2**31, (3, 4, -(-VOCAB // 32))).astype(np.int32)
    tables = write(empty, packed(1, (), (), allowed_token_ids=[0]))
    tables = tables.with_masks(np.int32([1, 3, 0]), masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")[..., :VOCAB]
    places = np.arange(4, dtype=np.int32)
    every = np.ones_like(bits[0])
    for slot, want in enumerate((every, bits[0], every, bits[1])):
        got = is_set(tables.masks_at(np.full_like(places, slot), places), VOCAB)
        np.testing.assert_array_equal(got, want)


def test_the_null_slot_changes_nothing(empty):
    """A row without tables reads it, whatever was written in its own slot."""
    tables = write(empty, packed(1, range(40), ((3,),), allowed_token_ids=[0]))
    assert not tables.bias[0].any() and (tables.more_stop_ids[0] == -1).all()
    before = np.full((1, MAX_BAD_WORD_TOKENS - 1), -1, np.int32)
    assert (tables.ends_of_bad_words(np.int32([0]), before) == -1).all()
    after = tables.with_tokens(np.int32([0]), np.int32([5]), np.int32([7]))
    np.testing.assert_array_equal(after.recent, tables.recent)


def test_the_newest_tokens_lie_at_their_index_modulo_the_room(empty):
    index = np.arange(40, 40 + MAX_BAD_WORD_TOKENS, dtype=np.int32)
    tables = empty.with_tokens(np.full_like(index, 3), index + 100, index)
    assert tables.recent[3, index % MAX_BAD_WORD_TOKENS].tolist() == (index + 100).tolist()
    assert (tables.recent[:3] == -1).all()
