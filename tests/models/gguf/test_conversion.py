"""Conversions: each order undoes the converter's, and none is given where sizes do not fit."""

import numpy as np
import pytest

from jaxspec.models.gguf import conversion


def test_pairs_of_channels_are_half_a_head_apart():
    published = np.arange(24)
    heads = published.reshape(3, 2, 4)
    stored = heads.swapaxes(1, 2).reshape(-1)  # channels i and i + 4 side by side
    np.testing.assert_array_equal(stored[conversion.by_pairs(3)(24)], published)
    assert conversion.by_pairs(5)(24) is None


@pytest.mark.parametrize(("key_heads", "value_heads", "before"), [(2, 6, 0), (2, 6, 8), (3, 3, 4)])
def test_value_heads_in_turns_are_put_behind_each_other(key_heads, value_heads, before):
    size, each = 4, value_heads // key_heads
    published = np.arange(before + value_heads * size)
    values = published[before:].reshape(key_heads, each, size)
    turns = [values[key, turn] for turn in range(each) for key in range(key_heads)]
    stored = np.concatenate([published[:before], *turns])
    order = conversion.tiled(key_heads, value_heads, before)
    np.testing.assert_array_equal(stored[order(published.size)], published)
    assert order(published.size + 1) is None and order(before) is None


def test_parts_of_all_key_heads_are_put_head_by_head():
    parts = (2, 2, 6, 6)
    published = np.arange(3 * sum(parts))
    heads = published.reshape(3, -1)
    stored = np.concatenate([part.reshape(-1) for part in np.split(heads, [2, 4, 10], axis=1)])
    order = conversion.by_key_head(3, parts)
    np.testing.assert_array_equal(stored[order(published.size)], published)
    assert order(published.size - 3) is None


def test_key_heads_that_can_t_share_value_heads_give_no_order():
    assert conversion.tiled(4, 6)(24) is None


def test_shapes_are_published_ones_or_stay_as_they_are():
    for change, stored, expected in (
        (conversion.convolution, (160, 4), (160, 1, 4)),
        (conversion.convolution, (160,), (160,)),
        (conversion.column, (8, 1), (8,)),
        (conversion.column, (8, 2), (8, 2)),
        (conversion.row, (64,), (1, 64)),
        (conversion.row, (1, 64), (1, 64)),
        (conversion.grouped(2), (2, 48), (96,)),
        (conversion.grouped(2), (4, 24), (4, 24)),
        (conversion.grouped(1), (96,), (96,)),
    ):
        assert change(stored) == expected


def test_rates_are_logarithms_again_to_the_last_bit_but_one():
    published = np.random.default_rng(0).uniform(-6, 4, 999).astype(np.float32)
    stored = -np.exp(published)
    found = conversion.LOG_OF_NEGATED.back(stored)
    assert found.dtype == np.float32
    # The relative error of exp is an absolute one of the logarithm.
    np.testing.assert_allclose(found, published, rtol=1.3e-7, atol=1.3e-7)
    np.testing.assert_array_equal(
        conversion.LESS_ONE.back(np.array([0.5, 1, 3], np.float32)), [-0.5, 0, 2]
    )
