"""Qwen3's output head."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import CacheOptions, Snapshot
from jaxspec.models import load_model


@pytest.fixture(scope="module")
def model(fixture_folder):
    return load_model(fixture_folder("qwen3"), jnp.float32)


def test_part_of_the_head_gives_those_scores(model):
    hidden, ids = jnp.ones((2, model.config.hidden_size)), jnp.asarray([200, 3, 17], jnp.int32)
    part = model.logits(hidden, model.lm_head_columns(ids))
    np.testing.assert_allclose(part, model.logits(hidden)[:, ids], rtol=1e-5, atol=1e-6)


def test_the_greedy_token_is_that_of_the_logits(model):
    hidden = np.random.default_rng(0).normal(size=(5, model.config.hidden_size)).astype("f")
    ids, forbidden = np.array([200, 3, 17], np.int32), np.full((5, 2), -1, np.int32)
    for columns in (None, model.lm_head_columns(ids)):
        scores = np.array(model.logits(hidden, columns))
        forbidden[:, 0] = first = model.greedy_tokens(hidden, forbidden[:, :0], columns)
        np.testing.assert_array_equal(first, scores.argmax(axis=1))
        np.put_along_axis(scores, forbidden[:, :1], -np.inf, axis=1)
        second = model.greedy_tokens(hidden, forbidden, columns)
        np.testing.assert_array_equal(second, scores.argmax(axis=1))


def test_qwen3_has_no_draft_head(model):
    assert model.draft_head is None and not model.has_draft_head
    (kv,) = model.cache_specs(CacheOptions(*[jnp.dtype("float32")] * 3, Snapshot()))
    assert kv.layers == len(model.trunk.layers)
