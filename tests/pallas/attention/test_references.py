"""Softmax with sinks equals one with one more column; the width of page tables by platform."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import normal

from jaxspec.pallas.attention.references import masked_softmax, whole_context


def test_a_sink_is_one_more_score():
    rng = np.random.default_rng(0)
    scores, sinks = normal(rng, 2, 3, 2, 4, 7), normal(rng, 6)
    scores[..., 5:] = -np.inf
    column = np.broadcast_to(sinks.reshape(1, 3, 2, 1, 1), (2, 3, 2, 4, 1))
    wide = jax.nn.softmax(np.concatenate([scores, column], -1), axis=-1)
    np.testing.assert_allclose(masked_softmax(scores, sinks), wide[..., :-1], atol=1e-6)
    np.testing.assert_allclose(
        masked_softmax(scores, None), jax.nn.softmax(scores, axis=-1), atol=1e-6
    )


def test_a_token_that_sees_nothing_gets_zeros():
    scores = jnp.full((2, 1, 2, 3), -jnp.inf)
    for sinks in (None, jnp.array([-200.0, 90.0])):
        np.testing.assert_array_equal(masked_softmax(scores, sinks), jnp.zeros_like(scores))


def test_large_scores_do_not_overflow():
    scores = jnp.array([[[[300.0, 299.0]], [[-300.0, -300.0]]]])
    found = masked_softmax(scores, jnp.array([-300.0, 300.0]))
    np.testing.assert_allclose(found[0, 0, 0], jax.nn.softmax(jnp.array([300.0, 299.0])))
    np.testing.assert_array_equal(found[0, 1, 0], [0.0, 0.0])


@pytest.mark.parametrize(
    ("platform", "widths"), [("cpu", [8, 8, 16, 16, 32]), ("gpu", [1, 8, 9, 16, 17])]
)
def test_whole_contexts_double_where_the_longest_row_counts(platform, widths, monkeypatch):
    here = SimpleNamespace(platform=platform)
    monkeypatch.setattr("jaxspec.device.default_device", lambda: here)
    assert [whole_context(width, 16) for width in (1, 8, 9, 16, 17)] == widths
