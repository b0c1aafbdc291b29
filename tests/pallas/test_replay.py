"""The ring's cursor: no step may write a row of the ring that it still reads."""

import numpy as np
import pytest

from jaxspec.pallas.replay import folds_spread, must_fold, next_ring_length, ring_rows


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
    slots = np.array([4, 0, 2, 3, -1, 1, 5])
    length = np.array([1, 9, 5, 2, 9, 8, 9])
    query_len = np.array([3, 3, 1, 2, 3, 3, 0])
    order = folds_spread(slots, length, query_len, 3, 8)
    assert order.tolist() == [2, 0, 5, 3, 1, 4, 6]
    assert order.dtype == np.int32


@pytest.mark.parametrize("folding", [0, 1, 7, 64])
def test_each_row_comes_once_and_no_fold_is_among_the_last(folding):
    count = 64
    length = np.random.default_rng(folding).permutation([8] * folding + [0] * (count - folding))
    order = np.asarray(folds_spread(np.arange(1, 1 + count), length, np.ones(count), 3, 8))
    assert sorted(order) == list(range(count))
    at = np.flatnonzero(length[order] == 8)
    if 1 < folding < count:
        assert np.ptp(np.diff(at)) <= 1 and at[-1] < 0.7 * count
