from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prefixes import Prefixes

from jaxspec.pallas.matmul.scores import mask_columns
from jaxspec.requests.sampling_features import (
    BIAS,
    FULL,
    MIN_P,
    PENALTIES,
    SAMPLED,
    SMALL_TOP_K,
    TEMPERATURE,
    TOP_K,
    TOP_K_TOP_P,
    SamplingFeatures,
)
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling import processors
from jaxspec.sampling.processors import (
    PROCESSORS,
    adjusted_logits,
    forbidden_ids,
    has_choice,
    process_logits,
)

VOCAB = 32
process = jax.jit(process_logits, static_argnames="features")


@pytest.mark.parametrize("features", [TOP_K, FULL], ids=str)
def test_masks_that_are_off_change_no_bit(features, make_inputs):
    random = np.random.default_rng(1)
    logits = random.normal(size=(16, VOCAB)).astype(np.float32) * 50
    logits[3] = 0.0
    logits[4, ::2] = -np.inf
    logits[5, 7] = np.nan
    logits[6, 7] = np.inf
    temperature = random.choice([0.0, 0.3, 1.0, 1.7], 16)
    inputs = make_inputs(16, temperature, top_k=[0, -1] * 8, stop_ids=np.full((16, 2), 5))
    positions = jnp.arange(16, dtype=jnp.int32)
    sampled = process(logits, inputs, positions, features=SAMPLED)
    masked = process(logits, inputs, positions, features=features)
    np.testing.assert_array_equal(np.asarray(masked).view("i4"), np.asarray(sampled).view("i4"))
    cold = temperature == 0
    np.testing.assert_array_equal(np.asarray(sampled)[cold], logits[cold])


def test_stop_ids_are_forbidden_and_masked_only_below_the_minimum_length(make_inputs):
    logits = jnp.zeros((4, VOCAB), jnp.float32)
    stop_ids = np.array([[3, 31], [3, -1], [-1, -1], [0, 1]])
    inputs = make_inputs(4, stop_ids=stop_ids, min_len=10)
    positions = jnp.array([9, 9, 9, 10], jnp.int32)
    forbidden = forbidden_ids(inputs, positions)
    assert forbidden.dtype == jnp.int32
    assert forbidden.tolist() == [[3, 31], [3, -1], [-1, -1], [-1, -1]]
    got = mask_columns(logits, forbidden_ids(inputs, positions))
    masked = [np.flatnonzero(np.isneginf(row)).tolist() for row in np.asarray(got)]
    assert masked == [[3, 31], [3], [], []]


@pytest.mark.parametrize("features", [TOP_K, FULL], ids=str)
def test_the_mask_of_stop_ids_comes_before_top_k(features, make_inputs):
    logits = -np.arange(VOCAB, dtype=np.float32)[None, :]
    inputs = make_inputs(1, temperature=0.5, top_k=2, stop_ids=[[0, 2]], min_len=1)
    got = np.asarray(process(logits, inputs, jnp.zeros(1, jnp.int32), features=features))[0]
    assert np.flatnonzero(np.isfinite(got)).tolist() == [1, 3]
    np.testing.assert_array_equal(got[[1, 3]], [-2, -6])


def test_a_finite_logit_stays_finite_however_cold_it_is(make_inputs):
    """A logit that overflowed would count as forced (+inf) or forbidden."""
    logits = np.array([[3e38, -3e38, 1.0], [np.inf, -np.inf, np.nan]], np.float32)
    inputs, positions = make_inputs(2, temperature=1e-4), jnp.zeros(2, jnp.int32)
    got = np.asarray(process(logits, inputs, positions, features=SAMPLED))
    assert np.isfinite(got[0]).all() and got[0, 0] > got[0, 2] > got[0, 1]
    np.testing.assert_array_equal(got[1], logits[1])
    assert has_choice(logits, inputs, positions, features=SAMPLED).tolist() == [True, False]


def test_half_precision_logits_are_processed_in_float32(make_inputs):
    logits = jnp.ones((1, VOCAB), jnp.bfloat16)
    got = process(logits, make_inputs(1, temperature=0.3), jnp.zeros(1, jnp.int32), features=FULL)
    np.testing.assert_array_equal(got, np.full((1, VOCAB), np.float32(1) / np.float32(0.3)))


def test_there_is_a_processor_of_every_name_that_a_sampler_may_have(make_inputs):
    logits, inputs = jnp.zeros((1, VOCAB)), make_inputs(1)
    assert list(PROCESSORS) == [BIAS, PENALTIES, TEMPERATURE, MIN_P, SMALL_TOP_K, TOP_K_TOP_P]
    with pytest.raises(ValueError, match="mirostat"):
        process_logits(logits, inputs, inputs.seed, features=SamplingFeatures.of("mirostat"))


@pytest.mark.parametrize(
    ("own", "state", "reads"),
    [
        ({}, 0, False),
        ({}, 5, True),  # of a grammar
        ({"logit_bias": {3: 1.5}}, 0, True),
        ({"presence_penalty": 0.5}, 0, True),
        ({"repetition_penalty": 1.5}, 0, True),
    ],
    ids=str,
)
def test_tables_are_read_where_a_row_needs_them(own, state, reads, monkeypatch):
    real, passes = processors.add_bias, []

    def counted(*args):
        jax.debug.callback(lambda: passes.append(1))
        return real(*args)

    monkeypatch.setattr(processors, "add_bias", counted)
    plain = SamplingParams(temperature=0.8)
    requests = [((1, 2), (3,), plain, (), ()), ((4,), (5, 6), replace(plain, **own), (), ())]
    prefixes = Prefixes(requests, 1, VOCAB)
    inputs = prefixes.inputs()
    states = inputs.grammar_states.at[1].set(state)
    inputs = replace(inputs, columns=inputs.columns | {"grammar_states": states})
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    positions = jnp.asarray(prefixes.positions()[:, 0])
    features = SamplingFeatures.of(BIAS, PENALTIES, TEMPERATURE)
    found = adjusted_logits(jnp.asarray(logits), inputs, positions, features=features)
    jax.effects_barrier()
    assert bool(passes) == reads
    np.testing.assert_allclose(found, prefixes.expected(logits[:, None])[:, 0] / 0.8, rtol=1e-5)
