import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import Use, gumbel_noise, uniform_noise
from jaxspec.sampling.noise import row_keys

KEYS = [[1214273199, 3384852239], [268645893, 1840719140], [1093557767, 4154625324]]
VALUES = [1.214213, 0.204392, -0.623563, -0.772915]
noise = jax.jit(gumbel_noise, static_argnums=3)
uniform = jax.jit(uniform_noise)


def positions_of(rows, start=0):
    return jnp.arange(start, start + rows, dtype=jnp.int32)


def test_noise_of_two_uses_seeds_or_positions_is_independent():
    seeds, positions = jnp.arange(200, dtype=jnp.int32), positions_of(200, 50)
    drawn = [np.asarray(noise(seeds, positions, use, 100)).ravel() for use in Use]
    drawn.append(np.asarray(noise(seeds + 1, positions, Use.TARGET, 100)).ravel())
    drawn.append(np.asarray(noise(seeds, positions + 1, Use.TARGET, 100)).ravel())
    correlation = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(correlation).max() < 5 / np.sqrt(200 * 100)


def test_gumbel_noise_is_finite_and_has_the_moments_of_its_law():
    seeds = jnp.arange(-500, 500, dtype=jnp.int32)
    values = np.asarray(noise(seeds, seeds, Use.TARGET, 1000), np.float64)
    assert np.isfinite(values).all()
    assert abs(values.mean() - np.euler_gamma) < 5 * 1.28 / 1000
    assert abs(values.var() - np.pi**2 / 6) < 0.02
    # The tail that decides: P(g > x) = 1 - exp(-exp(-x)).
    assert abs((values > 6).mean() - 0.002476) < 5 * np.sqrt(0.0025 / 1e6)


def test_noise_of_an_id_does_not_depend_on_the_size_of_the_vocabulary():
    seeds = jnp.arange(3, dtype=jnp.int32)
    small, large = (np.asarray(noise(seeds, seeds, Use.DRAFT, vocab)) for vocab in (1000, 1003))
    np.testing.assert_array_equal(small, large[:, :1000])


def test_uniform_noise_fills_the_open_interval():
    values = np.asarray(uniform(positions_of(100_000), positions_of(100_000), Use.ACCEPT))
    assert values.min() > 0 and values.max() < 1
    counts = np.histogram(values, 20, (0, 1))[0]
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)


def test_noise_of_chosen_ids_is_that_of_the_whole_vocabulary():
    seeds, ids = positions_of(3), jnp.array([[5, 0], [999, 7], [3, 3]], jnp.int32)
    whole = np.asarray(noise(seeds, seeds, Use.TARGET, 1000))
    chosen = jax.jit(gumbel_noise)(seeds, seeds, Use.TARGET, ids)
    np.testing.assert_array_equal(chosen, np.take_along_axis(whole, np.asarray(ids), axis=1))


def by_seed(count, vocab):
    return positions_of(count), jnp.full(count, 9, jnp.int32), vocab


def by_position(count, vocab):
    return jnp.full(count, 9, jnp.int32), positions_of(count), vocab


@pytest.mark.parametrize("rows_of", [by_seed, by_position])
def test_neighbouring_seeds_and_positions_are_independent(rows_of):
    """Uniform over rows at each id, and without correlation between neighbours of any kind."""
    seeds, positions, vocab = rows_of(4096, 64)
    values = np.asarray(noise(seeds, positions, Use.TARGET, vocab), np.float64)
    shares = np.exp(-np.exp(-values))  # uniform, if the values are Gumbel's
    counts = np.stack([np.histogram(column, 16, (0, 1))[0] for column in shares.T])
    statistic = ((counts - 256.0) ** 2 / 256.0).sum(axis=1)
    assert abs(statistic.mean() - 15) < 5 * np.sqrt(2 * 15 / vocab)
    assert statistic.max() < 60
    spread = 1 / np.sqrt(shares.size)
    for a, b in ((shares[1:], shares[:-1]), (shares[:, 1:], shares[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 * spread


def test_keys_and_tokens_are_pinned():
    """A change of the generator changes what every seed gives."""
    keys = row_keys(jnp.array([0, 7, -1]), jnp.array([0, 5, 9]), Use.TARGET)
    assert np.stack(keys, axis=1).tolist() == KEYS
    values = np.asarray(noise(jnp.array([7]), jnp.array([5]), Use.TARGET, 4))[0]
    np.testing.assert_allclose(values, VALUES, rtol=1e-5)
