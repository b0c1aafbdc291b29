"""The largest entries of a row, against a stable sort of all of it."""

import jax
import numpy as np
import pytest

from jaxspec.sampling.top_n import top_n

LARGEST = jax.jit(top_n, static_argnums=1)


def expected(x, n):
    """A stable sort, in which equals keep the order of their columns."""
    x = np.where(np.isnan(x), -np.inf, x)
    order = np.argsort(-x, axis=1, kind="stable")[:, :n]
    missing = (0, 0), (0, n - order.shape[1])
    values = np.take_along_axis(x, order, axis=1)
    return np.pad(values, missing, constant_values=-np.inf), np.pad(
        order, missing, constant_values=-1
    )


def check(x, n):
    got, (values, columns) = LARGEST(x.astype(np.float32), n), expected(x.astype(np.float32), n)
    np.testing.assert_array_equal(got.columns, columns)
    np.testing.assert_array_equal(got.values, values)


# Fewer than n, one block, fewer blocks than n, blocks alone, and blocks with a rest behind them.
@pytest.mark.parametrize("columns", [1, 19, 128, 264, 2560, 2688, 2701, 5247])
@pytest.mark.parametrize("kinds", [2, 50, 10**9], ids=["ties", "some ties", "none"])
def test_it_is_the_head_of_a_stable_sort(columns, kinds):
    random = np.random.default_rng([columns, kinds])
    check(random.integers(0, kinds, (7, columns)) / 16, 20)


@pytest.mark.parametrize("n", [1, 5])
def test_all_of_them_may_lie_in_one_block_or_each_in_another(n):
    x = np.zeros((3, 4000))
    x[0, 1280 : 1280 + n] = np.arange(n) + 1  # in one block
    x[1, np.arange(n) * 700 + 127] = 1  # in the last column of several
    x[2, -n:] = 1  # behind the last whole block
    check(x, n)


def test_equals_in_more_blocks_than_are_looked_at_come_from_the_first_ones():
    x = np.zeros((2, 128 * 40))
    x[0, ::128] = 1
    x[1, 127::128] = 1
    x[1, 5000] = 2
    check(x, 20)


@pytest.mark.parametrize("columns", [40, 3000])
def test_zero_equals_minus_zero(columns):
    x = np.zeros((2, columns))
    x[0, ::2] = -0.0
    x[1, 1::2] = -0.0
    check(x, 20)


def test_nan_counts_as_minus_infinity_which_is_a_value():
    x = np.full((3, 3000), -np.inf)
    x[0, 100], x[0, 200], x[0, 2999] = np.nan, -1e30, np.inf
    x[1] = np.nan
    x[2, ::7] = np.arange(len(x[2, ::7]))
    x[2, 2996] = np.nan
    check(x, 20)
