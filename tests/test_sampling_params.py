"""Sampling parameters: what is taken, what is refused, and what a request then needs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampler import FULL, GREEDY, SAMPLED
from jaxspec.sampling_params import GREEDY_BELOW, SamplingParams


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number from 0 to 1,000,000, got -0.1"),
        ({"temperature": math.nan}, "temperature must be a number .* got nan"),
        ({"temperature": math.inf}, "temperature must be a number .* got inf"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], got 1.01"),
        ({"top_p": -1}, r"top_p must be in \(0, 1\], got -1"),
        ({"top_p": math.nan}, r"top_p must be in \(0, 1\], got nan"),
        ({"top_k": -2}, "top_k must be an integer of at least -1, got -2; -1 turns it off"),
        ({"top_k": 1.5}, "top_k must be an integer of at least -1, got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": 3.0}, "max_tokens must be an integer of at least 1, got 3.0"),
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"n": True}, "n must be an integer of at least 1, got True"),
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must not exceed max_tokens, got 9 > 8"),
        ({"stop": ""}, r"stop strings must be non-empty strings, got \[''\]"),
        ({"stop": ["a", ""]}, r"stop strings must be non-empty strings, got \['a', ''\]"),
        ({"stop": [3]}, r"stop strings must be non-empty strings, got \[3\]"),
        ({"seed": 2**64}, "seed must be an integer that fits in 64 bits, got 18446744073709551616"),
        ({"seed": 1.5}, "seed must be an integer that fits in 64 bits, got 1.5"),
    ],
)
def test_a_value_outside_its_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": -1},
        {"min_tokens": 128},
        {"max_tokens": 1},
        {"seed": 0},
        {"seed": -(2**63)},
        {"stop": None},
        {"stop_token_ids": None},
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(changes):
    SamplingParams(**changes)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)


@pytest.mark.parametrize(
    ("changes", "sampler"),
    [
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, GREEDY),
        ({"temperature": 9e-6, "top_k": 5}, GREEDY),
        ({"temperature": 1.1e-5}, SAMPLED),
        ({}, SAMPLED),
        ({"top_k": 0}, SAMPLED),
        ({"top_k": 1}, FULL),
        ({"top_p": 0.99}, FULL),
    ],
)
def test_the_sampler_is_the_least_that_can_serve_the_request(changes, sampler):
    assert SamplingParams(**changes).sampler == sampler


@pytest.mark.parametrize("steps", [-3, -1, 0, 1, 3])
def test_host_and_device_agree_on_what_is_greedy(steps):
    """Around the bound by float32's own steps, and by a tenth of one, which float32 rounds away."""
    bound = np.float32(GREEDY_BELOW)
    for fraction in (0.0, 0.1, -0.1):
        temperature = float(bound) + (steps + fraction) * float(np.spacing(bound))
        on_device = bool(jnp.float32(temperature) < GREEDY_BELOW)  # as sampling/params.py asks
        assert SamplingParams(temperature=temperature).is_greedy == on_device
