"""Texts of any lengths in one forward pass, against each text alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import load_model
from jaxspec.models.sequence import text_logits, text_logprobs

TEXTS = 4
LENGTH = 70


@pytest.fixture(scope="module")
def lfm2(fixture_folder):
    """A model with attention and convolutions, which would see another text's tokens."""
    return load_model(fixture_folder("lfm2"), jnp.float32)


@pytest.fixture(scope="module")
def logprobs(lfm2):
    return jax.jit(lambda *arrays: text_logprobs(lfm2, *arrays))


@pytest.mark.parametrize("lengths", [(70, 64, 1, 65), (0, 3, 70, 0), (0, 0, 0, 0), (2, 9, 1, 30)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_text_has_the_engine_s_logprobs(lfm2, logprobs, single_request, lengths, temperature):
    tokens = np.random.default_rng(0).integers(0, lfm2.vocab_size, (TEXTS, LENGTH), np.int32)
    found = logprobs(tokens, np.array(lengths), jnp.float32(temperature))
    assert found.shape == (TEXTS, LENGTH - 1) and found.dtype == jnp.float32
    for text, own, length in zip(tokens, np.asarray(found), lengths, strict=True):
        assert not own[max(length - 1, 0) :].any()
        if length < 2:
            continue
        _, logits = single_request(lfm2).prefill(text[:length])
        logits = logits[:-1].astype(np.float64) / temperature
        want = logits[np.arange(length - 1), text[1:length]] - np.log(np.exp(logits).sum(1))
        np.testing.assert_allclose(own[: length - 1], want, rtol=0, atol=1e-5)


def test_an_id_outside_the_vocabulary_gives_nan_and_spoils_no_other_text(lfm2, logprobs):
    tokens = np.random.default_rng(0).integers(0, lfm2.vocab_size, (TEXTS, LENGTH), np.int32)
    lengths, one = np.full(TEXTS, 20), jnp.float32(1)
    clean = np.asarray(logprobs(tokens, lengths, one))
    for wrong in (-1, lfm2.vocab_size):
        tokens[1, 5], tokens[2, 20:] = wrong, wrong
        found = np.asarray(logprobs(tokens, lengths, one))
        assert np.isnan(found[1, 4]) and np.isfinite(found).sum() == found.size - 1
        np.testing.assert_array_equal(found[[0, 2, 3]], clean[[0, 2, 3]])


def test_texts_of_one_token_predict_none(lfm2):
    ones, one = jnp.ones(3, jnp.int32), jnp.float32(1)
    found = jax.eval_shape(lambda: text_logprobs(lfm2, ones[:, None], ones, one))
    assert found.shape == (3, 0)


def test_logits_of_all_texts_are_those_of_their_logprobs(lfm2, logprobs):
    tokens = np.random.default_rng(1).integers(0, lfm2.vocab_size, (TEXTS, LENGTH), np.int32)
    lengths = np.array([70, 0, 1, 30])
    logits = jax.jit(lambda *arrays: text_logits(lfm2, *arrays))(tokens, lengths)
    assert logits.shape == (TEXTS, LENGTH, lfm2.vocab_size) and logits.dtype == jnp.float32
    is_padding = np.arange(LENGTH) >= lengths[:, None]
    assert not np.asarray(logits)[is_padding].any() and np.asarray(logits)[~is_padding].any(1).all()
    own = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], 2)[..., 0]
    own = np.where(is_padding[:, 1:], 0, own)
    np.testing.assert_allclose(own, logprobs(tokens, lengths, jnp.float32(1)), rtol=0, atol=1e-5)
