"""Law 9 for Qwen3."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import CacheOptions, Snapshot
from jaxspec.models import load_model


@pytest.fixture(scope="module")
def model(fixture_folder):
    return load_model(fixture_folder("qwen3"), jnp.float32)


def test_loaded_weights_reproduce_the_reference_logits(model, reference, single_request):
    expected = reference("qwen3")
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    ids = np.concatenate([prompt, greedy])
    for chunk in (1, 7, 64, len(ids)):
        _, logits = single_request(model).prefill(ids, chunk)
        np.testing.assert_allclose(logits, expected["logits_full"], rtol=0, atol=5e-4)
    for count in (1, 4):
        logits = single_request(model).decode(prompt, greedy, count)
        np.testing.assert_allclose(logits, expected["logits_decode"], rtol=0, atol=2e-4)


def test_part_of_the_head_gives_those_scores(model):
    hidden, ids = jnp.ones((2, model.config.hidden_size)), jnp.asarray([200, 3, 17], jnp.int32)
    part = model.logits(hidden, model.lm_head_columns(ids))
    np.testing.assert_allclose(part, model.logits(hidden)[:, ids], rtol=1e-6)


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
