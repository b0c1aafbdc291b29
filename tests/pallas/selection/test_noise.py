import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.selection.noise import RowKeys, gumbel, open_uniform, random_bits

VOCAB = 248_320
KEYS = np.random.default_rng(0).integers(0, 2**32, (12, 2), dtype=np.uint32)
# Keys that differ in few bits: threefry gives none such, but they must do no harm.
ALIKE = np.array([[k, 0] for k in range(6)] + [[0, k] for k in range(1, 7)], np.uint32)
bits = jax.jit(random_bits)


def bits_of(keys, ids=VOCAB):
    """The definition, in NumPy."""
    ids, (first, second) = np.arange(ids, dtype=np.uint32), keys.T[:, :, None]
    x = ids * np.uint32(0x9E3779B9) + first
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB) + second
    x = (x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x ^ (x >> np.uint32(14))


def deviations(counts):
    """Pearson's chi-square of equally likely cells, in standard deviations."""
    mean = counts.sum() / counts.size
    statistic = ((counts - mean) ** 2 / mean).sum()
    return (statistic - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1))


def test_the_bits_are_the_definition():
    ids = jnp.arange(5000, dtype=jnp.uint32)[None, :]
    found = bits(RowKeys(*(jnp.asarray(key)[:, None] for key in KEYS.T)), ids)
    np.testing.assert_array_equal(found, bits_of(KEYS, 5000))


@pytest.mark.parametrize("keys", [KEYS, ALIKE], ids=["random keys", "keys alike"])
def test_the_bits_of_neighbouring_ids_are_uniform_and_independent(keys):
    for row in bits_of(keys):
        for shift, width in ((24, 8), (20, 12), (0, 8), (12, 8)):
            digits = (row >> np.uint32(shift)) & np.uint32(2**width - 1)
            assert abs(deviations(np.bincount(digits, minlength=2**width))) < 5
        high, low = row >> np.uint32(26), row & np.uint32(63)
        for after in (high[1:], low[1:]):
            pairs = 64 * high[:-1] + after
            assert abs(deviations(np.bincount(pairs, minlength=4096))) < 5
        share = row / 2.0**32
        for lag in (1, 2, 7, 64, 512, 1000):
            correlation = np.corrcoef(share[lag:], share[:-lag])[0, 1]
            assert abs(correlation) < 5 / np.sqrt(VOCAB)


@pytest.mark.parametrize("keys", [KEYS, ALIKE], ids=["random keys", "keys alike"])
def test_two_rows_are_independent_also_shifted(keys):
    shares = bits_of(keys) / 2.0**32
    correlation = np.corrcoef(shares) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5 / np.sqrt(VOCAB)
    shifted = np.corrcoef(shares[:, 1:], shares[:, :-1])
    np.fill_diagonal(shifted, 0.0)
    assert np.abs(shifted).max() < 5.5 / np.sqrt(VOCAB)


def test_a_changed_bit_of_an_id_changes_half_of_the_bits():
    keys = np.random.default_rng(1).integers(0, 2**32, (50, 2), dtype=np.uint32)
    rows = bits_of(keys, 2**12)
    for bit in range(12):
        changed = rows ^ rows[:, np.arange(2**12) ^ (1 << bit)]
        flips = np.unpackbits(changed.view(np.uint8).reshape(*changed.shape, 4), axis=2)
        assert np.abs(flips.mean(axis=(0, 1)) - 0.5).max() < 0.02


def test_gumbel_noise_is_exact_to_a_few_units_in_the_last_place():
    """Above all at its largest values, which the smallest uniforms give."""
    random = np.random.default_rng(2)
    sizes = (2.0 ** random.uniform(0, 32, 200_000)).astype(np.uint32)
    ends = np.arange(1000, dtype=np.uint32)
    values = np.concatenate([sizes, ends, np.uint32(2**32 - 1) - ends])
    uniform = np.asarray(jax.jit(open_uniform)(values))
    assert uniform.min() > 0.0 and uniform.max() < 1.0
    found = np.asarray(jax.jit(gumbel)(values), np.float64)
    want = -np.log(-np.log1p(-uniform.astype(np.float64)))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=3e-7)
