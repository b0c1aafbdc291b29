"""The rotation of each token, against the formulas in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import turns as oracle_turns

from jaxspec.models.config import Llama3Scaling, RopeConfig, YarnScaling
from jaxspec.models.layers.rope import frequencies, rotation


def test_angles_are_positions_times_frequencies():
    rope, positions = RopeConfig(theta=1e4, rotary_dim=8), np.array([0, 1, 7, 1000])
    turns = frequencies(rope)
    np.testing.assert_allclose(turns, 1e4 ** (-np.arange(0, 8, 2) / 8), rtol=1e-6)
    assert turns is frequencies(RopeConfig(1e4, 8)) and not turns.flags.writeable
    cos, sin = rotation(jnp.asarray(positions, jnp.int32), rope)
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


PUBLISHED = YarnScaling(4.0, 32768)  # as Qwen3's model card gives it
DEEPSEEK = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize(
    ("theta", "dim", "scaling"),
    [
        (1e6, 128, PUBLISHED),
        (1e4, 64, DEEPSEEK),
        (1e4, 16, YarnScaling(8.0, 64)),
        (1.5e5, 64, YarnScaling(32.0, 4096, truncate=False)),  # gpt-oss
        (1e4, 16, YarnScaling(2.0, 8, beta_fast=1.0, beta_slow=1.0)),  # no pair between
        (1e4, 16, YarnScaling(1.0, 64)),  # a factor that changes nothing
    ],
)
def test_yarn_blends_frequencies_by_the_index_of_the_pair(theta, dim, scaling):
    turns, plain = (
        frequencies(RopeConfig(theta, dim, scaling)),
        theta ** -(np.arange(dim // 2) * 2 / dim),
    )
    length = scaling.original_max_position_embeddings
    # Turns within the original context as a function of the pair's index, solved for the index.
    low, high = (
        dim / 2 * np.log(length / (2 * np.pi * times)) / np.log(theta)
        for times in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    for pair, (got, original) in enumerate(zip(turns, plain, strict=True)):
        share = min(max((pair - low) / max(high - low, 0.001), 0), 1)
        wanted = original / scaling.factor * share + original * (1 - share)
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    within = length * plain / (2 * np.pi)
    kept = within > 1.5 * scaling.beta_fast
    np.testing.assert_allclose(turns[kept], plain[kept], rtol=0.1)


@pytest.mark.parametrize(
    ("scaling", "magnitude"),
    [
        (PUBLISHED, 0.1 * np.log(4) + 1),
        (DEEPSEEK, 1.0),
        (
            YarnScaling(40.0, 4096, mscale=0.7, mscale_all_dim=1.0),
            (0.07 * np.log(40) + 1) / (0.1 * np.log(40) + 1),
        ),
        (YarnScaling(40.0, 4096, mscale=0.7), 0.1 * np.log(40) + 1),  # counts only with the other
        (YarnScaling(4.0, 4096, attention_factor=1.5, mscale=1.0, mscale_all_dim=0.5), 1.5),
        (YarnScaling(1.0, 4096), 1.0),
    ],
)
def test_yarn_multiplies_cosines_and_sines(scaling, magnitude):
    rope, position = RopeConfig(1e4, 16, scaling), jnp.asarray([0, 3, 500], jnp.int32)
    cos, sin = rotation(position, rope)
    np.testing.assert_allclose(cos**2 + sin**2, np.full((3, 8), magnitude**2), rtol=1e-5)
    assert rope.magnitude == pytest.approx(magnitude) and cos.dtype == sin.dtype == jnp.float32


def test_slower_turns_are_those_of_an_earlier_position():
    slow = Llama3Scaling(4, 1e3, 1e4, 64)  # by which every pair is slow
    scaled, _ = rotation(jnp.asarray([12], jnp.int32), RopeConfig(1e4, 8, slow))
    plain, _ = rotation(jnp.asarray([3], jnp.int32), RopeConfig(1e4, 8))
    np.testing.assert_allclose(scaled, plain, atol=1e-6)
