"""Penalties at every place of a verify, against a count of the whole prefix in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prefixes import Prefixes

from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling import SamplingInputs
from jaxspec.sampling.penalties import has_penalty, penalize

VOCAB, WIDTH = 24, 4
jitted = jax.jit(penalize)
KINDS = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 0.5, "frequency_penalty": -1.1, "repetition_penalty": 1.2},
    {},
]


def prefixes(random):
    """Many repeats; in some the step begins with the last token of the prompt."""
    requests = []
    for kind in KINDS * 3:
        prompt = random.integers(0, VOCAB // 2, random.integers(1, 9)).tolist()
        length = WIDTH - 1 + random.choice([0, 0, 1, 5, 20])
        output = random.integers(0, VOCAB // 2 + 4, length).tolist()
        requests.append((prompt, output, SamplingParams(**kind), (), ()))
    return Prefixes(requests, WIDTH, VOCAB)


def penalized(prefixes, logits):
    inputs = prefixes.inputs().repeat(WIDTH)
    flat = logits.reshape(-1, VOCAB)
    return np.asarray(jitted(flat, inputs, prefixes.positions().reshape(-1))).reshape(logits.shape)


@pytest.mark.soak
def test_each_place_counts_the_drafts_in_front_of_it_and_none_behind():
    random = np.random.default_rng(0)
    given = prefixes(random)
    logits = random.normal(size=(len(given.requests), WIDTH, VOCAB)).astype(np.float32)
    got = penalized(given, logits)
    np.testing.assert_allclose(got, given.expected(logits), atol=1e-5)
    assert (got[0, 1] != got[0, 2] + logits[0, 1] - logits[0, 2]).any()  # the places differ


@pytest.mark.soak
def test_a_row_without_penalties_keeps_every_bit():
    random = np.random.default_rng(1)
    logits = random.normal(size=(len(KINDS) * 3, WIDTH, VOCAB)).astype(np.float32) * 50
    logits[:, :, :4] = [np.nan, np.inf, -np.inf, -0.0]
    got = penalized(prefixes(random), logits)[len(KINDS) - 1 :: len(KINDS)]
    want = logits[len(KINDS) - 1 :: len(KINDS)]
    np.testing.assert_array_equal(got.view("i4"), want.view("i4"))


def test_a_row_without_penalties_reads_the_null_slot():
    """So a program that can do everything reads the counts of a request only for its penalty."""
    given = prefixes(np.random.default_rng(3))
    inputs, positions = given.inputs().repeat(WIDTH), given.positions().reshape(-1)
    asks = np.asarray(has_penalty(inputs))
    assert asks.tolist() == [bool(kind) for kind in KINDS * 3 for _ in range(WIDTH)]
    worker_spec = jnp.where(asks, inputs.slot, 10**6)  # beyond the tables: any answer of theirs
    moved = SamplingInputs(inputs.columns | {"slot": worker_spec}, inputs.tables, inputs.tokens)
    logits = np.random.default_rng(4).normal(size=(len(asks), VOCAB)).astype(np.float32)
    np.testing.assert_array_equal(
        jitted(logits, inputs, positions), jitted(logits, moved, positions)
    )


def test_the_case_of_a_verify_that_repeats_itself():
    """After 1.5 a time, 100 - 1.5 falls below 99; after 0.7 the second time does (cases 5.2)."""
    requests = [
        ([5, 6, 7], [2, 1, 1, 1], SamplingParams(frequency_penalty=1.5), (), ()),
        ([7, 8, 9], [4, 1, 1, 1], SamplingParams(frequency_penalty=0.7), (), ()),
    ]
    logits = np.full((2, 4, VOCAB), 0.0, np.float32)
    logits[:, :, 1], logits[:, :, 15] = 100, 99
    best = penalized(Prefixes(requests, 4, VOCAB), logits).argmax(axis=2)
    assert best.tolist() == [[1, 15, 15, 15], [1, 1, 15, 15]]


def test_nothing_is_counted_without_tables():
    with pytest.raises(ValueError, match="counts"):
        penalize(jnp.zeros((1, 3)), SamplingInputs({}), jnp.zeros(1, jnp.int32))


def test_the_pass_over_the_logits_has_no_scatter():
    """So that XLA joins it with what is behind it."""
    given = prefixes(np.random.default_rng(2))
    inputs, positions = given.inputs().repeat(WIDTH), given.positions().reshape(-1)
    text = jitted.lower(jnp.zeros((positions.size, VOCAB)), inputs, positions).as_text()
    assert "scatter" not in text
