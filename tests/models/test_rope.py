"""The rotation of each token, against the formulas in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import turns as oracle_turns

from jaxspec.models.config import Llama3Scaling, RopeConfig
from jaxspec.models.layers.rope import frequencies, rotation


def test_angles_are_positions_times_frequencies():
    rope, positions = RopeConfig(theta=1e4, rotary_dim=8), np.array([0, 1, 7, 1000])
    turns = frequencies(rope)
    np.testing.assert_allclose(turns, 1e4 ** (-np.arange(0, 8, 2) / 8), rtol=1e-6)
    assert turns is frequencies(RopeConfig(1e4, 8)) and not turns.flags.writeable
    cos, sin = rotation(jnp.asarray(positions, jnp.int32), turns)
    angles = positions[:, None] * turns.astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-4)
    assert cos.dtype == sin.dtype == jnp.float32


@pytest.mark.parametrize(
    ("theta", "dim", "scaling"),
    [
        (5e5, 128, Llama3Scaling(8, 1, 4, 8192)),  # Llama 3.1
        (5e5, 64, Llama3Scaling(32, 1, 4, 8192)),  # Llama 3.2
        (1e4, 8, Llama3Scaling(1, 1, 4, 64)),  # a factor that changes nothing
        (1e4, 16, Llama3Scaling(4, 0.5, 0.75, 64)),
    ],
)
def test_slow_pairs_of_channels_are_slower_by_a_factor(theta, dim, scaling):
    rope = {"rope_type": "llama3", "rope_theta": theta, **dataclasses.asdict(scaling)}
    turns = frequencies(RopeConfig(theta, dim, scaling))
    np.testing.assert_allclose(turns, oracle_turns(rope, dim), rtol=1e-6)
    plain = frequencies(RopeConfig(theta, dim))
    assert turns.dtype == np.float32 and turns.shape == plain.shape
    assert turns[0] == plain[0]  # the fastest
    np.testing.assert_allclose(turns[-1], plain[-1] / scaling.factor, rtol=1e-6)


def test_another_rule_of_frequencies_needs_no_other_rotation():
    turns = frequencies(RopeConfig(1e4, 8))
    scaled, _ = rotation(jnp.asarray([12], jnp.int32), turns / 4)
    plain, _ = rotation(jnp.asarray([3], jnp.int32), turns)
    np.testing.assert_allclose(scaled, plain, atol=1e-6)
