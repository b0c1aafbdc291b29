"""The largest of a row are those of a stable sort, however they are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import candidates
from jaxspec.sampling.candidates import largest

find = jax.jit(largest, static_argnums=1)


@pytest.fixture(autouse=True)
def blocks_are_small(monkeypatch):
    """A vocabulary of hundreds then takes the way of one of hundred thousands."""
    monkeypatch.setattr(candidates, "MAX_SORTED", 32)
    yield
    find.clear_cache()


@pytest.mark.parametrize("width", [16, 33, 256, 1001])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_the_largest_are_the_first_of_a_stable_sort(width, count):
    random = np.random.default_rng(width + count)
    rows = np.stack(
        [
            random.normal(size=width),
            random.integers(0, 3, width),  # ties within blocks and across
            np.zeros(width),
            np.arange(width),
            -np.arange(width),
            np.where(np.arange(width) == width - 1, 0.0, -np.inf),
            np.full(width, -np.inf),
            np.where(random.integers(0, 2, width), 0.0, -0.0),
        ]
    ).astype(np.float32)
    rows[0, width // 2] = np.inf
    values, columns = find(rows, count)
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    assert columns.dtype == jnp.int32 and values.dtype == jnp.float32
    np.testing.assert_array_equal(columns, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, expected, axis=1))


def test_every_column_may_be_asked_for():
    row = np.random.default_rng(0).normal(size=(2, 200)).astype(np.float32)
    np.testing.assert_array_equal(find(row, 200)[1], np.argsort(-row, axis=1, kind="stable"))


def test_a_row_with_nan_gets_some_of_its_columns():
    rows = np.full((2, 300), np.nan, np.float32)
    rows[1, ::2] = 1.0
    _, columns = find(rows, 8)
    assert (np.asarray(columns) >= 0).all() and (np.asarray(columns) < 300).all()


def test_a_neighbour_changes_nothing():
    rows = np.random.default_rng(1).normal(size=(4, 500)).astype(np.float32)
    changed = np.where(np.arange(4)[:, None] == 2, rows, np.nan)
    np.testing.assert_array_equal(find(rows, 7)[1][2], find(changed, 7)[1][2])
