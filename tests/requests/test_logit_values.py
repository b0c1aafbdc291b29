"""Parameters that act on logits: what is taken, what is refused and how it is said."""

import math

import numpy as np
import pytest

from jaxspec.requests.sampling_features import (
    BIAS,
    GREEDY,
    MIN_P,
    PENALTIES,
    SAMPLED,
    TOP_K,
    SamplingFeatures,
)
from jaxspec.requests.sampling_params import SamplingParams

REFUSED = [
    ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1; 0 turns it off"),
    ({"min_p": 1.1}, "min_p must be a number from 0 to 1, got 1.1"),
    ({"min_p": math.nan}, "min_p must be .* got nan"),
    ({"min_p": True}, "min_p must be .* got True"),
    ({"presence_penalty": 2.1}, "presence_penalty must be a number from -2 to 2, got 2.1; 0 turns"),
    ({"presence_penalty": None}, "presence_penalty must be .* got None"),
    ({"frequency_penalty": -2.1}, "frequency_penalty must be a number from -2 to 2, got -2.1"),
    ({"frequency_penalty": "1"}, "frequency_penalty must be .* got '1'"),
    (
        {"repetition_penalty": 0},
        "repetition_penalty must be a .* from 1e-06 to 1e.06, got 0; 1",
    ),
    ({"repetition_penalty": math.inf}, "repetition_penalty must be .* got inf"),
    ({"repetition_penalty": -1.0}, "repetition_penalty must be .* got -1.0"),
    ({"logit_bias": [1]}, r"logit_bias must be a dict of token ids and biases, got \[1\]. Write"),
    ({"logit_bias": {"a": 1}}, "logit_bias must be a dict of token ids"),
    ({"logit_bias": {True: 1}}, "logit_bias must be a dict of token ids"),
    ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\] must be a number .* got nan"),
    ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\] must be a number .* got inf"),
    ({"logit_bias": {3: None}}, r"logit_bias\[3\] must be a number .* got None"),
    ({"allowed_token_ids": []}, r"allowed_token_ids must be a list of at least one .* got \[\]"),
    ({"allowed_token_ids": 3}, "allowed_token_ids must be a list of at least one .* got 3"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids must be a list of at least one"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids must be a list of at least one"),
    ({"allowed_token_ids": np.ones((2, 2), int)}, "allowed_token_ids must be a list"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids must be a list of at least one"),
    ({"bad_words": [""]}, r"bad_words must be a list of texts that are not empty, got \[''\]"),
    ({"bad_words": [" "]}, "bad_words must be a list of texts that are not empty"),
    ({"bad_words": "word"}, "bad_words must be a list .* got 'word'. A single text goes in as a"),
    ({"bad_words": [3]}, r"bad_words must be a list of texts that are not empty, got \[3\]"),
    ({"bad_words": ["a"] * 129}, "bad_words must be at most 128 texts .* got 129 with up to 1. Gi"),
    ({"bad_words": ["a" * 1025]}, "at most 1,024 characters, got 1 with up to 1,025"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda case: str(case)[:40])
def test_a_value_outside_its_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        SamplingParams(**changes)
    assert len(str(caught.value)) < 300


def test_numbers_of_numpy_are_kept_as_pythons():
    params = SamplingParams(
        logit_bias={np.int64(3): np.float32(0.5)},
        allowed_token_ids=np.array([4, 5]),
        min_p=np.float32(0.25),
        repetition_penalty=np.int32(2),
    )
    assert params.logit_bias == {3: 0.5} and params.allowed_token_ids == [4, 5]
    assert [type(x) for each in params.logit_bias.items() for x in each] == [int, float]
    assert type(params.min_p) is type(params.repetition_penalty) is float


@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({"temperature": 0.0}, GREEDY),
        ({"temperature": 0.0, "min_p": 0.5}, GREEDY),
        ({"min_p": 0.5}, SAMPLED | SamplingFeatures.of(MIN_P)),
        ({"top_k": 3, "min_p": 1.0}, TOP_K | SamplingFeatures.of(MIN_P)),
        ({"temperature": 0.0, "presence_penalty": 0.1}, SamplingFeatures.of(PENALTIES)),
        ({"temperature": 0.0, "frequency_penalty": -0.1}, SamplingFeatures.of(PENALTIES)),
        ({"repetition_penalty": 1.1}, SAMPLED | SamplingFeatures.of(PENALTIES)),
        ({"logit_bias": {}, "bad_words": None, "repetition_penalty": 1}, SAMPLED),
        ({"logit_bias": {1: 0.0}}, SAMPLED | SamplingFeatures.of(BIAS)),
        ({"allowed_token_ids": [1]}, SAMPLED | SamplingFeatures.of(BIAS)),
        ({"temperature": 0.0, "bad_words": ["a"]}, SamplingFeatures.of(BIAS)),
    ],
    ids=str,
)
def test_a_request_wants_the_processors_of_its_parameters(changes, features):
    assert SamplingParams(**changes).features == features
