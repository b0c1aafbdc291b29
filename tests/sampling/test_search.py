"""The search finds the very logit at which top-k and top-p end, and how many of its equals stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.selection.parts import PART
from jaxspec.sampling import search
from jaxspec.sampling.search import Bound, bound_of_mass, bound_of_top_k, last_id, mass_within

VOCAB = PART + 500
ROWS = 8
WANTED = np.ones(ROWS, bool)
TINY = np.finfo(np.float32).tiny


@pytest.fixture(scope="module")
def logits():
    """Continuous, tied, both signs, neighbours in float32, infinite and huge."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(ROWS, VOCAB)).astype(np.float32)
    rows[1] = random.integers(-2, 3, VOCAB)
    rows[2] = np.where(random.integers(0, 2, VOCAB), 0.0, -0.0)
    rows[3] = np.float32(1.0) + random.integers(0, 4, VOCAB) * np.float32(2.0**-23)
    rows[4, 100:] = -np.inf
    rows[5, 7] = np.inf
    rows[6] *= 1e30
    rows[7] = -np.arange(VOCAB) / 64
    return rows


def kept(rows, bound):
    """What a bound keeps."""
    last = np.asarray(jax.jit(last_id)(rows, bound, WANTED))[:, None]
    limit, ids = np.asarray(bound.logit)[:, None], np.arange(VOCAB)[None, :]
    return (rows > limit) | ((rows == limit) & (ids <= last))


@pytest.mark.parametrize("top_k", [1, 129, 3000, PART, VOCAB])
def test_top_k_keeps_the_first_of_a_stable_sort(top_k, logits):
    bound = jax.jit(bound_of_top_k)(logits, np.full(ROWS, top_k, np.int32), WANTED)
    ranks = np.argsort(np.argsort(-logits, axis=1, kind="stable"), axis=1)
    np.testing.assert_array_equal(kept(logits, bound), ranks < top_k)


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.3, 0.9, 0.999])
def test_a_mass_is_reached_by_as_few_as_can(share, logits):
    """Up to rounding of float32 sums: a little less does not reach it, and a little more does."""
    largest = logits.max(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        mass = np.exp(logits.astype(np.float64) - largest[:, None])
    mass[logits == largest[:, None]] = 1.0
    total = np.asarray(jax.jit(mass_within)(logits, largest, Bound.none(logits), WANTED))
    np.testing.assert_allclose(total, mass.sum(axis=1), rtol=1e-5)
    args = logits, largest, np.float32(share) * total, Bound.none(logits), WANTED
    keeps = kept(logits, jax.jit(bound_of_mass)(*args))
    order = np.argsort(-logits, axis=1, kind="stable")
    for row, ids in enumerate(order):
        count = keeps[row].sum()
        assert count >= 1 and keeps[row, ids[:count]].all()
        reached = np.cumsum(mass[row, ids]) / mass[row].sum()
        assert reached[count - 1] >= share - 2e-5
        assert count == 1 or reached[count - 2] <= share + 2e-5


def test_a_mass_is_measured_within_a_bound_and_never_ends_behind_it(logits):
    largest, top_k = logits.max(axis=1), np.full(ROWS, 300, np.int32)
    bound = jax.jit(bound_of_top_k)(logits, top_k, WANTED)
    total = np.asarray(jax.jit(mass_within)(logits, largest, bound, WANTED))
    first = -np.sort(-logits.astype(np.float64), axis=1)[:, :300]
    with np.errstate(invalid="ignore"):
        mass = np.where(first == first[:, :1], 1.0, np.exp(first - first[:, :1]))
    np.testing.assert_allclose(total, mass.sum(axis=1), rtol=1e-5)
    for target in (0.5 * total, 2.0 * total):
        found = jax.jit(bound_of_mass)(logits, largest, target, bound, WANTED)
        assert (kept(logits, found) <= kept(logits, bound)).all()


def test_rows_that_are_not_wanted_keep_what_they_had(logits):
    wanted, top_k = np.arange(ROWS) % 2 == 0, np.full(ROWS, 5, np.int32)
    found = jax.jit(bound_of_top_k)(logits, top_k, wanted)
    assert np.isneginf(found.logit[~wanted]).all() and (found.number[~wanted] == VOCAB).all()
    within = Bound(np.full(ROWS, 2.5, np.float32), np.arange(ROWS, dtype=np.int32))
    args = logits, logits.max(axis=1), np.full(ROWS, 0.5, np.float32), within, ~WANTED
    for got, had in zip(jax.jit(bound_of_mass)(*args), within, strict=True):
        np.testing.assert_array_equal(got, had)


def test_keys_have_the_order_of_the_numbers_and_come_back():
    bits = np.random.default_rng(1).integers(0, 2**32, 10_000, dtype=np.uint32)
    ends = np.float32([0.0, -0.0, np.inf, -np.inf, TINY, -TINY])
    numbers = np.concatenate([bits.view(np.float32), ends])
    numbers = np.sort(numbers[~np.isnan(numbers)])
    numbers = np.where(np.abs(numbers) < TINY, np.float32(0.0), numbers)
    keys = np.asarray(search._to_keys(jnp.asarray(numbers)))
    np.testing.assert_array_equal(np.diff(keys) > 0, np.diff(numbers) > 0)
    np.testing.assert_array_equal(search._from_keys(jnp.asarray(keys)), numbers)
    finite = numbers[numbers < np.inf]
    assert (np.asarray(search._next_above(jnp.asarray(finite))) > finite).all()
    assert np.isnan(search._next_above(jnp.float32(np.inf)))
    ends = jnp.array([-(2**31), 2**31 - 1], jnp.int32)
    assert np.isneginf(search._from_keys(ends)[0]) and np.isnan(search._from_keys(ends)[1])
