"""Tokens are brought to their tiles, and come back as the sum of their rows."""

import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import NAN_ROW, drawn
from races import assert_no_races

from jaxspec.pallas.moe.work_list import work_list

EXPERTS, PARTS = 5, 3


def tokens_and_tiles(tokens, features, rows, dtype):
    """The tokens, which experts they chose, and the tiles."""
    x, _, choices = drawn(tokens, PARTS, EXPERTS, features, 8, dtype)
    return x, choices, work_list(choices, EXPERTS, rows)


@pytest.mark.parametrize(
    ("tokens", "features", "rows", "dtype"),
    [(5, 128, 8, jnp.bfloat16), (4, 768, 32, jnp.float16)],
)
def test_every_place_has_the_token_that_chose_it_without_races(
    interpreter, tokens, features, rows, dtype
):
    from jaxspec.pallas.moe.tiles_kernel import to_tiles_kernel

    x, choices, work = tokens_and_tiles(tokens, features, rows, dtype)
    count = work.expert.shape[0]
    padded = jnp.pad(x, ((0, 3), (0, 0)))  # rows beyond the tokens have no place
    tiled, at_place, weights = to_tiles_kernel(
        padded, work, choices, none=EXPERTS, interpret=interpreter
    )
    assert tiled.shape == (count, rows, features) and tiled.dtype == dtype
    expected = np.asarray(work.choices)
    is_real = expected >= 0
    expected = expected[is_real]
    np.testing.assert_array_equal(np.asarray(at_place)[is_real], expected)
    np.testing.assert_array_equal(
        np.asarray(weights)[is_real], np.asarray(choices.weights).ravel()[expected]
    )
    # As float32, because NumPy does not take two bfloat16 NaN for equal.
    found, wanted = (np.asarray(a, np.float32) for a in (tiled, x))
    of_experts = is_real & (np.asarray(work.expert) < EXPERTS)[:, None]  # padding is not copied
    tokens = np.asarray(work.choices)[of_experts] // PARTS
    np.testing.assert_array_equal(found[of_experts], wanted[tokens])
    assert_no_races()


@pytest.mark.parametrize(
    ("tokens", "features", "dtype"),
    [(5, 128, jnp.bfloat16), (4, 768, jnp.float16), (3, 2688, jnp.bfloat16)],
)
def test_a_token_gets_the_sum_of_its_rows_in_order_without_races(
    interpreter, tokens, features, dtype
):
    """What is at no place is NaN, and so is what padding has."""
    from jaxspec.pallas.moe.tiles_kernel import from_tiles_kernel

    x, choices, work = tokens_and_tiles(tokens, features, 32, dtype)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(tokens, PARTS, features)) * 4.0 ** rng.integers(-3, 3, (tokens, 1, 1))
    rows[NAN_ROW, 1, 5] = np.nan
    is_padding = np.asarray(choices.experts)[:, 0] == EXPERTS
    rows[is_padding] = np.nan
    rows = jnp.asarray(rows, dtype)
    tiled = jnp.full((work.expert.shape[0] * 32, features), jnp.nan, dtype).at[work.place].set(rows)
    tiled = tiled.reshape(-1, 32, features)
    y = from_tiles_kernel(tiled, work, choices, none=EXPERTS, interpret=interpreter)
    total = np.zeros((tokens, features), np.float32)
    for part in range(PARTS):
        total += np.asarray(rows[:, part], np.float32)
    expected = jnp.asarray(np.where(is_padding[:, None], 0.0, total), dtype)
    assert y.dtype == dtype
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (y, expected)))
    assert_no_races()
