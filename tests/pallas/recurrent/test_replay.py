"""No step may write a row of the ring that it still reads; what blocks ask, in which order."""

from fractions import Fraction

import jax
import numpy as np
import pytest

from jaxspec.pallas.recurrent.replay import (
    asked_rows,
    must_fold,
    next_ring_length,
    places,
    ring_rows,
)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", range(1, 10))
def test_what_a_step_writes_it_does_not_read(width, itemsize):
    """Any acceptance, for as long as it takes to go round the ring many times."""
    rng, rows = np.random.default_rng(width), ring_rows(width, itemsize)
    num_computed, length, longest, folds = 7, 0, 0, 0
    for _ in range(500):
        read = {p % rows for p in range(num_computed - length, num_computed)}
        written = {p % rows for p in range(num_computed, num_computed + width)}
        assert len(read) == length and len(written) == width and not read & written
        folds += bool(must_fold(length, width, rows))
        kept = int(rng.integers(1, width + 1))
        length = int(next_ring_length(length, kept, width, rows))
        num_computed, longest = num_computed + kept, max(longest, length)
    assert rows - 2 * width < longest <= rows - width  # the window gets used
    assert folds > 5


def test_the_example_of_the_docstring():
    """8 rows, 3 tokens a step: a ring of 5 folds, and what that step kept stays in it."""
    assert [bool(must_fold(length, 3, 8)) for length in (0, 2, 3, 5)] == [False, False, True, True]
    assert [int(next_ring_length(p, n, 3, 8)) for p, n in ((0, 2), (2, 3), (5, 1))] == [2, 5, 1]


def test_rows_that_fold_come_among_the_others_and_padding_last():
    live = np.array([1, 0, 1, 1, 0, 1, 0], bool)
    folds = np.array([0, 1, 1, 0, 1, 1, 1], bool)
    place = places(live, folds)
    assert np.argsort(place).tolist() == [2, 0, 5, 3, 1, 4, 6]
    assert place.dtype == np.int32


def by_fractions(live, folds):
    """The rows in the order of `places`, by sorting."""
    folds = live & folds
    when = []
    for row in range(len(live)):
        alike = folds if folds[row] else live & ~folds
        at = Fraction(int(2 * alike[:row].sum() + 1), int(2 * alike.sum()) or 1)
        part = Fraction(3, 5) if folds[row] else 1
        when.append((not live[row], at * part if live[row] else 0, not folds[row], row))
    return [row for *_, row in sorted(when)]


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("folding", [0, 0.2, 0.5, 1])
@pytest.mark.parametrize("padding", [0, 0.3, 1])
def test_places_are_those_of_a_sorted_list(count, folding, padding):
    rng = np.random.default_rng(count)
    live, folds = rng.random(count) >= padding, rng.random(count) < folding
    place = np.asarray(places(live, folds))
    assert sorted(place) == list(range(count))
    assert np.argsort(place).tolist() == by_fractions(live, folds)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("count", [1, 8, 200])
def test_blocks_ask_of_their_rows_what_is_in_bounds(count, at_once):
    """Of padding, of slots that are not there, and of rows that are to count too much, too."""
    rng, slots, width, rows, large = np.random.default_rng(count), 9, 3, 11, 2**31 - 1
    conv_rows = 7

    def some(*values):
        return rng.choice(np.asarray(values, np.int32), count)

    index = (
        some(*range(slots), slots, -1, large, -large - 1),
        some(0, 1, 10, 11, 12, 10**9, large, -1, -large - 1),
        some(*range(rows), large, -1, -large - 1),
        some(*range(width + 1), 99, -1),
    )
    expected, live, folds = [], [], []
    for row, (slot, computed, length, tokens) in enumerate(zip(*index, strict=True)):
        live.append(0 < slot < slots and tokens > 0)
        length = min(max(length, 0), 8)
        folds.append(length > 5)
        begin, tokens = max(computed, 0) % rows, min(max(tokens, 0), width)
        of_conv = max(computed, 0) % conv_rows
        expected.append((row, slot if live[row] else 0, begin, length, tokens, of_conv))
    order = range(count) if at_once else by_fractions(np.asarray(live), np.asarray(folds))
    ask = jax.jit(asked_rows, static_argnums=(4, 5, 6), static_argnames=("at_once", "conv_rows"))
    asked = ask(*index, slots, width, rows, at_once=at_once, conv_rows=conv_rows)
    assert asked.dtype == np.int32
    np.testing.assert_array_equal(asked, np.transpose([expected[row] for row in order]))
