"""Functions of rows in tiles: a row has the same bits among any others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas import row_tiles
from jaxspec.pallas.row_tiles import by_rows

INNER, OUTER = 1536, 96


def product(rows):
    random = np.random.default_rng(1)
    weight = random.standard_normal((INNER, OUTER)) / INNER**0.5
    weight = jnp.asarray(weight, rows.dtype)
    return by_rows(lambda tile: jnp.tanh(jnp.matmul(tile, weight)), rows)


def in_tiles(rows):
    with row_tiles.deterministic():
        return product(rows)


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).standard_normal((70, INNER)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_among_any_others(rows, dtype):
    rows = jnp.asarray(rows, dtype)
    whole = np.asarray(jax.jit(in_tiles)(rows).astype(jnp.float32))
    for first, last in ((3, 4), (5, 13), (0, 31), (69, 70), (8, 70)):
        part = jax.jit(in_tiles)(rows[first:last])
        np.testing.assert_array_equal(np.asarray(part.astype(jnp.float32)), whole[first:last])
    expected = np.asarray(product(rows).astype(jnp.float32))
    np.testing.assert_allclose(whole, expected, atol=1e-5 if dtype == "float32" else 1e-2)


def test_without_tiles_the_number_of_rows_changes_bits(rows):
    """What the tiles are for: a product without them is seen by the test above."""
    plain = jax.jit(product)
    assert np.any(np.asarray(plain(rows[:31])) != np.asarray(plain(rows))[:31])


def test_results_and_arguments_are_trees_and_may_be_empty():
    def both(pair, offset):
        return {"sum": pair[0] + pair[1], "shifted": pair[0] + offset}

    def summed(count):
        x = jnp.arange(2.0 * count).reshape(count, 2)
        with row_tiles.deterministic():
            return x, by_rows(both, (x, 2 * x), jnp.ones((count, 1)))

    for count in (0, 1, 8, 9):
        x, found = summed(count)
        np.testing.assert_array_equal(found["sum"], 3 * x)
        np.testing.assert_array_equal(found["shifted"], x + 1)


def test_other_engines_have_the_function_itself(rows):
    plain = jax.make_jaxpr(product)(rows)
    assert not any(equation.primitive.name == "while" for equation in plain.eqns)
    assert any(
        equation.primitive.name == "while" for equation in jax.make_jaxpr(in_tiles)(rows).eqns
    )


def test_a_part_may_need_no_fixed_bits(rows):
    def inner(rows):
        with row_tiles.deterministic():
            with row_tiles.deterministic(False):
                rows = by_rows(jnp.sin, rows)
            return by_rows(jnp.cos, rows)

    found = [equation.primitive.name for equation in jax.make_jaxpr(inner)(rows).eqns]
    assert found.count("sin") == 1  # outside of the one loop
    assert found.count("while") == 1
