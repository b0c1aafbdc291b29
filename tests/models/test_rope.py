"""The rotation of each token, against the formula in float64."""

import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import RopeConfig
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


def test_another_rule_of_frequencies_needs_no_other_rotation():
    turns = frequencies(RopeConfig(1e4, 8))
    scaled, _ = rotation(jnp.asarray([12], jnp.int32), turns / 4)
    plain, _ = rotation(jnp.asarray([3], jnp.int32), turns)
    np.testing.assert_allclose(scaled, plain, atol=1e-6)
