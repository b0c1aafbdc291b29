"""The draw without masks gives the token that the masks of top-k, top-p and min-p give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.selection import LastKept, best_noisy
from jaxspec.requests.sampling_features import FULL, MIN_P, TOP_K, SamplingFeatures
from jaxspec.sampling import SamplingInputs, Use, draw
from jaxspec.sampling.candidates import MAX_SORTED
from jaxspec.sampling.noise import row_keys
from jaxspec.sampling.processors import process_logits

VOCAB, ROWS = MAX_SORTED + 1300, 96
RICH = FULL | SamplingFeatures.of(MIN_P)
run = jax.jit(draw, static_argnames="features")
process = jax.jit(process_logits, static_argnames="features")


@pytest.fixture(scope="module")
def logits():
    """Peaked, flat and with many ties."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(ROWS, VOCAB)).astype(np.float32)
    rows[::3] *= 4
    rows[1::6] = random.integers(-3, 4, (len(rows[1::6]), VOCAB))
    rows[5, 17] = np.inf
    return rows


def requests(top_k=-1, top_p=1.0, min_p=0.0, temperature=1.0):
    """Each of these in turn."""
    random, names = np.random.default_rng(1), ("top_k", "top_p", "min_p", "temperature")
    choices = dict(zip(names, (top_k, top_p, min_p, temperature), strict=True))
    columns = {
        name: jnp.asarray(random.choice(np.atleast_1d(values), ROWS), jnp.float32)
        for name, values in choices.items()
    }
    columns["top_k"] = columns["top_k"].astype(jnp.int32)
    columns |= {"seed": jnp.arange(ROWS, dtype=jnp.int32), "min_len": jnp.zeros(ROWS, jnp.int32)}
    return SamplingInputs(columns | {"stop_ids": jnp.zeros((ROWS, 0), jnp.int32)})


def by_masks(logits, inputs, positions, features):
    scores = process(logits, inputs, positions, features=features)
    keys, every = row_keys(inputs.seed, positions, Use.TARGET), jnp.ones(ROWS, bool)
    return best_noisy(scores, keys, ~inputs.is_greedy, LastKept.none(ROWS), every)


CASES = {
    "a small top-k": (TOP_K, {"top_k": [1, 20, 128], "top_p": [0.5, 1.0]}),
    "top-p": (FULL, {"top_p": [0.01, 0.3, 0.9, 0.99]}),
    "top-k": (FULL, {"top_k": [129, 1000, VOCAB - 1]}),
    "both": (FULL, {"top_k": [129, 1000], "top_p": [0.3, 0.9]}),
    "min-p": (RICH, {"min_p": [0.0, 0.05, 0.5, 1.0]}),
    "all": (
        RICH,
        {
            "top_k": [-1, 0, 5, 500, VOCAB],
            "top_p": [0.2, 0.9, 1.0],
            "min_p": [0.0, 0.02, 0.3],
            "temperature": [0.0, 0.6, 1.5],
        },
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_the_token_is_that_of_the_masks(case, logits):
    features, columns = CASES[case]
    inputs, positions = requests(**columns), jnp.arange(ROWS, dtype=jnp.int32) + 7
    tokens = np.asarray(run(logits, inputs, positions, features=features))
    np.testing.assert_array_equal(tokens, by_masks(logits, inputs, positions, features))


@pytest.mark.soak
def test_a_row_draws_the_same_in_a_program_that_can_do_more(logits):
    inputs, positions = requests(top_k=[-1, 20], temperature=[0.0, 0.8]), jnp.arange(ROWS)
    tokens = [run(logits, inputs, positions, features=each) for each in (TOP_K, FULL, RICH)]
    np.testing.assert_array_equal(tokens[0], tokens[1])
    np.testing.assert_array_equal(tokens[0], tokens[2])
