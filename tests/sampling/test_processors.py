import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampler import (
    BIAS,
    FULL,
    MIN_P,
    PENALTIES,
    SAMPLED,
    TEMPERATURE,
    TOP_K_TOP_P,
    Sampler,
)
from jaxspec.sampling.processors import (
    PROCESSORS,
    forbidden_ids,
    mask_stop_ids,
    mask_top_k_top_p,
    process_logits,
)

VOCAB = 32
mask = jax.jit(mask_top_k_top_p)
process = jax.jit(process_logits, static_argnames="sampler")


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
    def run(logits, top_k, top_p):
        inputs = make_inputs(len(logits), top_k=top_k, top_p=top_p)
        positions = jnp.zeros(len(logits), jnp.int32)
        return np.asarray(mask(jnp.asarray(logits, jnp.float32), inputs, positions))

    return run


@pytest.mark.parametrize("levels", [3, 1000], ids=["many ties", "no ties"])
def test_top_k_and_top_p_equal_the_oracle(levels, run_mask):
    random = np.random.default_rng(0)
    # Steps of an irrational size: no sum of probabilities falls on a limit by chance.
    logits = (random.integers(0, levels, (64, VOCAB)) * np.float32(np.sqrt(8) / levels)).astype("f")
    logits[::5, 3:20] = -np.inf
    top_k = random.choice([-1, 0, 1, 2, 5, 31, 32, 33], 64)
    top_p = random.choice([1e-9, 0.1234, 0.5678, 0.9012, 1.0], 64)
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


def test_masks_that_are_off_change_no_bit(make_inputs):
    random = np.random.default_rng(1)
    logits = random.normal(size=(16, VOCAB)).astype(np.float32) * 50
    logits[3] = 0.0
    logits[4, ::2] = -np.inf
    logits[5, 7] = np.nan
    logits[6, 7] = np.inf
    temperature = random.choice([0.0, 0.3, 1.0, 1.7], 16)
    inputs = make_inputs(16, temperature, top_k=[0, -1] * 8, stop_ids=np.full((16, 2), 5))
    positions = jnp.arange(16, dtype=jnp.int32)
    sampled = process(logits, inputs, positions, sampler=SAMPLED)
    full = process(logits, inputs, positions, sampler=FULL)
    np.testing.assert_array_equal(np.asarray(full).view("i4"), np.asarray(sampled).view("i4"))
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
    got = mask_stop_ids(logits, inputs, positions)
    masked = [np.flatnonzero(np.isneginf(row)).tolist() for row in np.asarray(got)]
    assert masked == [[3, 31], [3], [], []]


def test_the_mask_of_stop_ids_comes_before_top_k(make_inputs):
    logits = -np.arange(VOCAB, dtype=np.float32)[None, :]
    inputs = make_inputs(1, temperature=0.5, top_k=2, stop_ids=[[0, 2]], min_len=1)
    got = np.asarray(process(logits, inputs, jnp.zeros(1, jnp.int32), sampler=FULL))[0]
    assert np.flatnonzero(np.isfinite(got)).tolist() == [1, 3]
    np.testing.assert_array_equal(got[[1, 3]], [-2, -6])


def test_half_precision_logits_are_processed_in_float32(make_inputs):
    logits = jnp.ones((1, VOCAB), jnp.bfloat16)
    got = process(logits, make_inputs(1, temperature=0.3), jnp.zeros(1, jnp.int32), sampler=FULL)
    np.testing.assert_array_equal(got, np.full((1, VOCAB), np.float32(1) / np.float32(0.3)))


def test_there_is_a_processor_of_every_name_that_a_sampler_may_have(make_inputs):
    logits, inputs = jnp.zeros((1, VOCAB)), make_inputs(1)
    assert list(PROCESSORS) == [BIAS, PENALTIES, TEMPERATURE, MIN_P, TOP_K_TOP_P]  # vLLM's order
    with pytest.raises(ValueError, match="mirostat"):
        process_logits(logits, inputs, inputs.seed, sampler=Sampler.of("mirostat"))
