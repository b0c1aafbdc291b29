"""top-k and top-p keep what an oracle in float64 keeps, whichever processor serves the row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.requests.sampling_features import MAX_SMALL_TOP_K
from jaxspec.sampling.top_k_top_p import mask_small_top_k, mask_top_k_top_p

VOCAB = 32
LARGE = 2500  # ids that `candidates` does not sort
mask = jax.jit(mask_top_k_top_p)
mask_small = jax.jit(mask_small_top_k)


def top_k_top_p_oracle(row, top_k, top_p):
    """One row, in float64: sort, cut after k, cut where the mass is reached."""
    order = np.argsort(-row, kind="stable")
    num_kept = top_k if 0 < top_k < row.size else row.size
    if top_p < 1:
        weights = np.exp(row[order[:num_kept]].astype(np.float64) - row.max())
        reached = np.flatnonzero(np.cumsum(weights / weights.sum()) >= top_p)
        num_kept = min(num_kept, reached[0] + 1 if reached.size else num_kept)
    out = np.full_like(row, -np.inf)
    out[order[:num_kept]] = row[order[:num_kept]]
    return out


@pytest.fixture
def run_mask(make_inputs):
    """Both processors; where they serve the same rows, they must say the same."""

    def run(logits, top_k, top_p):
        logits = np.asarray(logits, np.float32)
        inputs = make_inputs(len(logits), top_k=top_k, top_p=top_p)
        positions = jnp.zeros(len(logits), jnp.int32)
        got = np.asarray(mask(logits, inputs, positions))
        small = np.asarray(mask_small(logits, inputs, positions))
        has_small = (inputs.top_k > 0) & (inputs.top_k <= MAX_SMALL_TOP_K)
        np.testing.assert_array_equal(
            small.view("i4"), np.where(has_small[:, None], got, logits).view("i4")
        )
        return got

    return run


@pytest.mark.parametrize("vocab", [VOCAB, LARGE])
@pytest.mark.parametrize("levels", [3, 1000], ids=["many ties", "no ties"])
def test_top_k_and_top_p_equal_the_oracle(levels, vocab, run_mask):
    random = np.random.default_rng(0)
    # Steps of an irrational size: no sum of probabilities falls on a limit by chance.
    steps = random.integers(0, levels, (64, vocab))
    logits = (steps * np.float32(np.sqrt(8) / levels)).astype("f")
    logits[::5, 3:20] = -np.inf
    logits[7] *= 40.0  # one id has nearly all mass
    logits[9, 5] = np.inf
    counts = [-1, 0, 1, 2, 5, 31, 32, 33, 127, 128, 129, 1000, vocab - 1, vocab, vocab + 1]
    top_k = random.choice(counts, 64)
    top_p = random.choice([1e-9, 0.1234, 0.5678, 0.9012, 1.0], 64)
    top_p[9] = 1.0
    expected = [top_k_top_p_oracle(*row) for row in zip(logits, top_k, top_p, strict=True)]
    np.testing.assert_array_equal(run_mask(logits, top_k, top_p), expected)


def test_ties_at_the_kth_value_keep_the_lower_ids(run_mask):
    row = np.array([1, 2, 0, 2, 2, -0.0, 2] + [-1] * (VOCAB - 7), np.float32)
    kept = [np.flatnonzero(np.isfinite(r)).tolist() for r in run_mask([row] * 4, [1, 3, 5, 6], 1.0)]
    assert kept == [[1], [1, 3, 4], [0, 1, 3, 4, 6], [0, 1, 2, 3, 4, 6]]


@pytest.mark.parametrize("top_p", [0.0, 0.125, 0.13, 0.25, 0.99, 1.0])
def test_top_p_keeps_the_shortest_run_that_reaches_its_mass(top_p, run_mask):
    equal = np.zeros(VOCAB)  # 1/32 each: every sum is exact
    assert np.isfinite(run_mask([equal], -1, top_p)).sum() == max(1, np.ceil(top_p * VOCAB))


def test_top_p_measures_what_top_k_left(run_mask):
    halves = -np.arange(1, VOCAB + 1) * np.log(2)  # after top-k 2: 2/3, 1/3
    assert [np.isfinite(run_mask([halves], 2, p)).sum() for p in (0.6, 0.7, 1.0)] == [1, 2, 2]


@pytest.mark.parametrize("top_k", [-1, 2, 300])
def test_a_token_that_is_forced_is_all_that_top_p_keeps(top_k, run_mask):
    row = np.zeros(LARGE)
    row[LARGE - 3] = np.inf
    assert np.flatnonzero(run_mask([row], top_k, 0.9)[0] > -np.inf).tolist() == [LARGE - 3]


@pytest.mark.parametrize("top_k", [-1, 3, 300])
def test_a_row_with_nan_keeps_it_and_its_neighbours_do_not_see_it(top_k, run_mask):
    random = np.random.default_rng(2)
    rows = random.normal(size=(3, LARGE)).astype(np.float32)
    rows[1, 17] = np.nan
    got = run_mask(rows, top_k, 0.8)
    assert np.isnan(got[1, 17])
    expected = [top_k_top_p_oracle(row, top_k, 0.8) for row in rows[::2]]
    np.testing.assert_array_equal(got[::2], expected)


def test_a_row_does_not_depend_on_how_many_there_are(make_inputs):
    random = np.random.default_rng(3)
    rows = random.normal(size=(16, LARGE)).astype(np.float32) * 3
    top_k, top_p = random.choice([-1, 20, 200], 16), random.uniform(0.5, 1.0, 16)
    positions = jnp.zeros(16, jnp.int32)
    together = mask(rows, make_inputs(16, top_k=top_k, top_p=top_p), positions)
    for row in (0, 7, 15):
        alone = make_inputs(1, top_k=top_k[row], top_p=top_p[row])
        np.testing.assert_array_equal(
            mask(rows[row : row + 1], alone, positions[:1])[0], together[row]
        )
