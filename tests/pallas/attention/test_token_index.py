"""The selection of a token index."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.attention.token_index import TokenIndex

PAGES = jnp.asarray([[2, 1]], jnp.int32)


def selected(scores, newest, top_k):
    """The tokens that an index of one head and one channel selects for these scores."""
    keys = jnp.asarray(scores, jnp.float32).reshape(2, 4, 1)
    pool = jnp.full((1, 3, 4, 1), jnp.nan).at[0, PAGES[0]].set(keys)
    ones = jnp.ones((1, len(newest), 1))
    index = TokenIndex(ones[..., None], ones, pool, top_k)
    return np.asarray(index.selected(0, PAGES, jnp.asarray(newest, jnp.int32)[None]))[0]


def test_the_earlier_of_equal_scores_is_selected():
    assert np.flatnonzero(selected([0, 3, 1, 3, -2, -1, 3, 0], [7], 2)).tolist() == [1, 3]
    # No score is below 0, so those of tokens 0, 4, 5 and 7 are equal.
    assert np.flatnonzero(selected([0, 3, 1, 3, -2, -1, 3, 0], [7], 6)).tolist() == [
        0,
        1,
        2,
        3,
        4,
        6,
    ]


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_only_visible_tokens_are_selected(top_k):
    """Also where fewer are visible than may be selected, and if others are NaN."""
    newest = [0, 2, 5]
    sees = np.arange(8) <= np.array(newest)[:, None]
    scores = np.array([1, 5, 2, 7, 6, 3, np.nan, np.inf])
    found = selected(scores, newest, top_k)
    for row, can in zip(found, sees, strict=True):
        best = np.argsort(-np.where(can, scores, -np.inf))[: min(top_k, can.sum())]
        assert np.flatnonzero(row).tolist() == sorted(best.tolist())
    assert not selected(scores, [-1], top_k).any()


def test_zeros_of_either_sign_are_equal():
    index = TokenIndex(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()), 2)
    assert index.best(jnp.asarray([[[-0.0, -1, 0.0, -0.0]]])).tolist() == [[[0, 2]]]
