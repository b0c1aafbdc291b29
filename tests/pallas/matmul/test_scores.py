"""The argmax of a row of scores, in one piece and combined from parts, against NumPy."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.matmul.scores import (
    NO_TOKEN,
    PartialArgmax,
    argmax_or_none,
    combine,
    has_argmax,
    mask_columns,
)

INF, NAN = np.inf, np.nan


def test_parts_combine_to_the_first_of_the_largest():
    score = jnp.asarray([[2.0, 5.0], [5.0, 1.0], [4.0, 5.0]])  # [parts, rows]
    column = jnp.asarray([[3, 14], [12, 11], [21, 20]], jnp.int32)
    parts = PartialArgmax(score, column, -jnp.abs(score))
    assert combine(parts, axis=0).winner.tolist() == [12, 14]


def test_a_part_with_a_nan_or_nothing_finite_spoils_its_row_alone():
    score = jnp.asarray([[2.0, -INF, 1.0], [3.0, -INF, 2.0]])
    nearest = jnp.asarray([[NAN, -INF, -1.0], [-3.0, -INF, -2.0]])
    column = jnp.asarray([[0, 0, 0], [1, 1, 1]], jnp.int32)
    best = combine(PartialArgmax(score, column, nearest), axis=0)
    assert best.winner.tolist() == [-1, -1, 1]


def test_masked_columns_are_minus_infinity_and_others_stay():
    scores = jnp.arange(8.0).reshape(2, 4)
    masked = mask_columns(scores, jnp.asarray([[0, -1], [9, 3]]))  # 9 is no column
    np.testing.assert_array_equal(masked, [[-INF, 1, 2, 3], [4, 5, 6, -INF]])


def test_a_row_needs_something_finite_and_no_nan():
    rows = jnp.asarray([[1, -INF], [INF, -INF], [1, NAN], [-INF, -INF], [INF, 0]])
    assert has_argmax(rows).tolist() == [True, False, False, False, True]


def test_the_argmax_is_the_lowest_of_equals_and_none_where_told():
    rows = jnp.asarray([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0]])
    assert argmax_or_none(rows, jnp.asarray([True, False])).tolist() == [1, NO_TOKEN]
