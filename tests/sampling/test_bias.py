"""Biases and masks at every place of a verify, against the whole prefix in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prefixes import Prefixes
from verification import draft_places

from jaxspec.requests.sampling_features import BIAS, PENALTIES, TEMPERATURE, SamplingFeatures
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling import SamplingInputs, draw, verify_rejection
from jaxspec.sampling.processors import has_choice, process_logits

VOCAB, WIDTH = 45, 4  # not a multiple of the bits of a word
STOPS = tuple(range(0, 44, 2))
process = jax.jit(process_logits, static_argnames="features")
jitted = partial(process, features=SamplingFeatures.of(BIAS))


def request(prompt, output, stop_ids=(), words=(), **params):
    return prompt, output, SamplingParams(**params), stop_ids, words


def biased(prefixes, logits, function=jitted, **options):
    inputs, width = prefixes.inputs().repeat(prefixes.width), prefixes.width
    got = function(logits.reshape(-1, VOCAB), inputs, prefixes.positions().reshape(-1), **options)
    return np.asarray(got).reshape(-1, width, VOCAB)


def test_biases_and_allowed_ids_act_at_every_place():
    random = np.random.default_rng(0)
    prompt, output = [1, 2, 3], [4, 5, 6, 7, 8]
    requests = [
        request(prompt, output, logit_bias={0: 2.5, 44: -1e6, 7: 100}),
        request(prompt, output, allowed_token_ids=[0, 31, 32, 44]),
        request(prompt, output, allowed_token_ids=[44, 3, 3], logit_bias={3: -1.0, 4: 50}),
        request(prompt, output),
        request(prompt, output, allowed_token_ids=np.arange(VOCAB)),
    ]
    logits = random.normal(size=(5, WIDTH, VOCAB)).astype(np.float32)
    logits[4, :, 2:5] = [np.nan, np.inf, -np.inf]
    prefixes = Prefixes(requests, WIDTH, VOCAB)
    got = biased(prefixes, logits)
    np.testing.assert_allclose(got, prefixes.expected(logits), rtol=1e-6)
    np.testing.assert_array_equal(got[3:].view("i4"), logits[3:].view("i4"))
    assert (np.isfinite(got[1]).sum(axis=1) == 4).all()


@pytest.mark.soak
def test_what_is_forbidden_counts_as_not_there_whatever_it_scores():
    requests = [request([1], [2, 3, 4], allowed_token_ids=[7]), request([1], [2, 3, 4])]
    logits = np.zeros((2, WIDTH, VOCAB), np.float32)
    logits[:, :, 8], logits[:, :, 9] = np.nan, np.inf
    prefixes = Prefixes(requests, WIDTH, VOCAB)
    assert np.flatnonzero(np.isfinite(biased(prefixes, logits)[0, 0])).tolist() == [7]
    inputs = prefixes.inputs().repeat(WIDTH)
    flat, positions = logits.reshape(-1, VOCAB), prefixes.positions().reshape(-1)
    sound = has_choice(jnp.asarray(flat), inputs, positions, features=SamplingFeatures.of(BIAS))
    assert sound.tolist() == [True] * 4 + [False] * 4


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_bad_word_is_matched_across_the_step_and_what_came_before(width):
    """The newest output decides; the prompt does not, and no word has a beginning before it."""
    random = np.random.default_rng(width)
    words = ((9,), (1, 5), (2, 2, 6), (1, 2, 3, 4, 7), tuple(range(31)) + (8,))
    requests = []
    for _ in range(60):
        output = random.integers(1, 4, width - 1 + random.integers(0, 40)).tolist()
        prompt = random.integers(1, 4, random.integers(1, 6)).tolist()
        requests.append(request(prompt, output, (), words, bad_words=["x"]))
    requests.append(request([3], [*range(31)], (), words, bad_words=["x"]))
    requests.append(request([0], [*range(1, 31)], (), words, bad_words=["x"]))
    prefixes = Prefixes(requests, width, VOCAB)
    logits = random.normal(size=(len(requests), width, VOCAB)).astype(np.float32)
    got, want = biased(prefixes, logits), prefixes.expected(logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.isneginf(got[-2, -1, 8]) and np.isfinite(got[-1, -1, 8])
    assert {int(i) for i in np.flatnonzero(np.isneginf(want).any(axis=(0, 1)))} >= {5, 6, 9}


def test_min_tokens_forbids_the_stop_ids_that_a_row_has_no_room_for():
    requests = [
        request([1, 2], [3] * 6, STOPS, min_tokens=least, max_tokens=20) for least in (0, 4, 5, 9)
    ]
    logits = np.zeros((4, WIDTH, VOCAB), np.float32)
    prefixes = Prefixes(requests, WIDTH, VOCAB)
    got = biased(prefixes, logits, process, features=SamplingFeatures.of(BIAS))
    np.testing.assert_array_equal(got, prefixes.expected(logits))
    assert np.isneginf(got).sum(axis=2).tolist() == [
        [0, 0, 0, 0],
        [len(STOPS), 0, 0, 0],
        [len(STOPS)] * 2 + [0, 0],
        [len(STOPS)] * 4,
    ]


def test_masks_and_biases_come_before_penalties_and_those_before_the_temperature():
    """A bias decides which way a repetition is punished, as in vLLM."""
    changes = {"logit_bias": {4: -3.0, 6: 2.0}, "repetition_penalty": 2.0, "temperature": 0.5}
    prefixes = Prefixes([request([4, 6], [4, 6, 1, 1], **changes)], 2, VOCAB)
    logits = np.ones((1, 2, VOCAB), np.float32)
    got = biased(
        prefixes, logits, process, features=SamplingFeatures.of(BIAS, PENALTIES, TEMPERATURE)
    )
    np.testing.assert_allclose(got, prefixes.expected(logits) / 0.5, rtol=1e-6)
    assert got[0, 0, [4, 6]].tolist() == [-8.0, 3.0]


def test_where_everything_is_forbidden_there_is_no_token():
    requests = [
        request([1], [7, 7, 7], (), ((7, 7),), allowed_token_ids=[7], bad_words=["x"]),
        request([1], [7, 7, 7], temperature=0.0),
    ]
    prefixes = Prefixes(requests, 1, VOCAB)
    inputs, positions = prefixes.inputs(), prefixes.positions().reshape(-1)
    tokens = draw(
        jnp.zeros((2, VOCAB)), inputs, positions, features=SamplingFeatures.of(BIAS, TEMPERATURE)
    )
    assert tokens.tolist() == [-1, 0]


@pytest.mark.soak
def test_drawn_drafts_keep_the_distribution_of_what_is_left(assert_distributed_as):
    """The target is biased and penalized at each place; the drafts know nothing of it."""
    rows, vocab, width = 20_000, 6, 3
    params = {"logit_bias": {0: 1.0}, "allowed_token_ids": [0, 1, 2, 4], "temperature": 0.9}
    one = request([1], [2, 1, 2], (), ((1, 4),), presence_penalty=0.8, bad_words=["x"], **params)
    prefixes = Prefixes([one], width, vocab)
    single = prefixes.inputs()
    columns = {name: jnp.repeat(x, rows, axis=0) for name, x in single.columns.items()}
    columns["seed"] = jnp.arange(rows, dtype=jnp.int32)
    tokens = jnp.repeat(single.tokens, rows, axis=0)
    random = np.random.default_rng(5)
    row, other = random.normal(size=(2, width, vocab)).astype(np.float32)
    logits = jnp.broadcast_to(row, (rows, width, vocab))
    drafts = jnp.broadcast_to(other[:-1], (rows, width - 1, vocab))
    inputs = SamplingInputs(columns, single.tables, tokens)
    positions = jnp.repeat(jnp.asarray(prefixes.positions()), rows, axis=0)
    drawn = jax.jit(draft_places)(drafts, inputs, positions[:, :-1])
    # The step's tokens are its last one and what was drawn: each row has a prefix of its own.
    inputs = SamplingInputs(columns, single.tables, jnp.concatenate([tokens[:, :1], drawn], 1))
    features = SamplingFeatures.of(BIAS, PENALTIES, TEMPERATURE)
    result = jax.jit(verify_rejection, static_argnames="features")(
        logits, drawn, drafts, inputs, positions, features=features
    )
    got = np.asarray(result.tokens)

    def probabilities(output, place):
        whole = [([1], output, *one[2:])]
        scores = Prefixes(whole, 1, vocab).expected(row[place][None, None])[0, 0] / 0.9
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    assert_distributed_as(got[:, 0], probabilities([2], 0))
    for first in (0, 1, 2):
        reached = got[(got[:, 0] == first) & (got[:, 1] >= 0), 1]
        if len(reached) > 500:
            want = probabilities([2, first], 1)
            kept = want > 0.02
            assert set(np.unique(reached)) <= set(np.flatnonzero(want > 0))
            both = np.isin(reached, np.flatnonzero(kept))
            assert_distributed_as(reached[both], np.where(kept, want, 0))
