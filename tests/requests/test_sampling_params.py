"""Sampling parameters: what is taken, what is refused, and what a request then needs."""

import dataclasses
import json
import math
import pickle
import types
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.requests.sampling_features import (
    BIAS,
    FULL,
    GREEDY,
    LOGPROBS,
    PROMPT_LOGPROBS,
    SAMPLED,
    TOP_K,
    SamplingFeatures,
)
from jaxspec.requests.sampling_params import GREEDY_BELOW, RequestOutputKind, SamplingParams
from jaxspec.requests.structured_outputs import StructuredOutputsParams


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
        ({"logprobs": -1}, "logprobs must be 0 to 20, got -1: the whole .* Ask for the 20 likel"),
        ({"logprobs": 21}, "logprobs must be at most 20, got 21; 0 reports the token's own alone"),
        ({"logprobs": True}, "logprobs must be an integer of at least 0, got True; 0 reports"),
        ({"logprobs": 2.0}, "logprobs must be an integer of at least 0, got 2.0"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be 0 to 20, got -1"),
        ({"prompt_logprobs": 10**9}, "prompt_logprobs must be at most 20, got 1000000000"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode must be .* got 'raw_logits'"),
        ({"logprobs_mode": np.zeros(2)}, "logprobs_mode must be .* got array"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs must be an integer .* got 'all'"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must not exceed max_tokens, got 9 > 8"),
        ({"stop": ""}, r"stop strings must be non-empty strings, got \[''\]"),
        ({"stop": ["a", ""]}, r"stop strings must be non-empty strings, got \['a', ''\]"),
        ({"stop": [3]}, r"stop strings must be non-empty strings, got \[3\]"),
        ({"seed": 2**64}, "seed must be an integer that fits in 64 bits, got 18446744073709551616"),
        ({"seed": 1.5}, "seed must be an integer that fits in 64 bits, got 1.5"),
        ({"seed": True}, "seed must be an integer that fits in 64 bits, got True"),
        ({"seed": 10**5000}, "seed must be .* 64 bits, got an integer of 16,610 bits"),
        ({"n": 16_385}, "n must be at most 16,384, got 16385."),
        ({"n": 10**400}, "n must be at most 16,384, got an integer of 1,329 bits"),
        ({"max_tokens": 2**63}, "max_tokens must be at most 9,223,372,036,854,775,807, got 92"),
        ({"temperature": True}, "temperature must be a number from .*, got True; 0 is greedy"),
        ({"temperature": "1"}, "temperature must be a number from .*, got '1'"),
        ({"temperature": 10**400}, "temperature must be a number from .*, got an integer of 1,329"),
        ({"temperature": np.array(1.0)}, "temperature must be a number"),
        ({"top_p": True}, r"top_p must be in \(0, 1\], got True"),
        ({"top_p": Fraction(1, 10**400)}, r"top_p must be in \(0, 1\], got "),
        ({"top_k": np.array([1, 2])}, r"top_k must be an integer of at least -1, got array"),
        ({"stop_token_ids": [True]}, r"stop_token_ids must be integers, got \[True\]; texts go to"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list, got 3"),
        ({"stop_token_ids": False}, "stop_token_ids must be a list, got False"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list, got 'ab'"),
        ({"stop_token_ids": np.ones((2, 2), int)}, "stop_token_ids must be a list, got array"),
        ({"stop": 3}, "stop must be a list, got 3"),
        ({"stop": b"a"}, "stop must be a list, got b'a'"),
        ({"stop": {"a"}}, "stop must be a list, got {'a'}"),
        ({"stop": ["a"] * 257}, "at most 256 strings of at most 1,024 characters, got 257 with up"),
        ({"stop": "a" * 1025}, "256 strings of at most 1,024 characters, got 1 with up to 1,025"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"detokenize": None}, "detokenize must be True or False, got None"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens must be True or False, got 'no'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be None, -1 or the number"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be an integer of at least -"),
        ({"output_kind": 1}, "output_kind must be one of RequestOutputKind.CUMULATIVE, .* got 1"),
        ({"stop": "a", "detokenize": False}, "stop strings are looked for in the text, and detok"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, dict) else None,
)
def test_a_value_outside_its_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        SamplingParams(**changes)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": -1},
        {"min_tokens": 128},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"truncate_prompt_tokens": -1},
        {"detokenize": False, "stop": []},
        {"seed": 0},
        {"seed": -(2**63)},
        {"stop": None},
        {"stop_token_ids": None},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"logprobs": None, "prompt_logprobs": None},
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(changes):
    SamplingParams(**changes)


def test_numbers_of_numpy_are_kept_as_pythons():
    integers = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
    python = dict.fromkeys(integers, 3) | {"temperature": 0.5, "top_p": 0.5, "ignore_eos": True}
    python["stop_token_ids"] = [1, 2]
    for kind in (np.int64, np.uint8):
        numpy = dict.fromkeys(integers, kind(3)) | {"temperature": np.float16(0.5)}
        numpy |= {"top_p": np.float64(0.5), "ignore_eos": np.True_}
        for ids in (np.array([1, 2]), [np.int8(1), np.int64(2)]):
            params = SamplingParams(**numpy, stop_token_ids=ids)
            assert params == SamplingParams(**python) and repr(params) == repr(
                SamplingParams(**python)
            )
            json.dumps(dataclasses.asdict(params) | {"output_kind": None})


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=("ab",)).stop == ["ab"]
    assert SamplingParams().stop == SamplingParams().stop_token_ids == []


def test_defaults_are_vllms_but_for_the_length():
    mine = dataclasses.asdict(SamplingParams())
    theirs = {"n": 1, "temperature": 1.0, "top_p": 1.0, "seed": None, "min_tokens": 0}
    theirs |= {"ignore_eos": False, "detokenize": True, "skip_special_tokens": True}
    theirs |= {"spaces_between_special_tokens": True, "include_stop_str_in_output": False}
    assert mine | theirs == mine
    assert (mine["max_tokens"], mine["output_kind"]) == (128, RequestOutputKind.CUMULATIVE)


def test_an_object_may_be_changed_and_is_checked_when_it_is_cloned():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    twin = params.clone()
    assert twin == params and twin is not params
    params.temperature = np.float32(0.5)
    params.stop.append("b")
    params.stop_token_ids += (2,)
    assert (twin.temperature, twin.stop, twin.stop_token_ids) == (1.0, ["a"], [1])
    again = params.clone()
    assert (again.temperature, again.stop, again.stop_token_ids) == (0.5, ["a", "b"], [1, 2])
    for name, wrong in (("temperature", -1), ("n", None), ("stop", [""]), ("min_tokens", 999)):
        changed = params.clone()
        setattr(changed, name, wrong)
        with pytest.raises(ValueError, match=name):
            changed.clone()


def test_what_no_parameter_is_called_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_token'"):
        SamplingParams(max_token=3)
    params = SamplingParams()
    with pytest.raises(AttributeError, match="max_token"):
        params.max_token = 3


def test_structured_outputs_are_read_from_both_names_of_vllm():
    form = StructuredOutputsParams(choice=["a", "b"])
    new, old = SamplingParams(structured_outputs=form), SamplingParams(guided_decoding=form)
    assert new.structured_outputs == old.structured_outputs == form
    assert SamplingParams(structured_outputs={"choice": ("a", "b")}) == new
    assert new.clone() == new and pickle.loads(pickle.dumps(new)) == new
    theirs = types.SimpleNamespace(json=None, regex="a+", choice=None, backend="auto")
    assert SamplingParams(guided_decoding=theirs).structured_outputs.regex == "a+"
    with pytest.raises(ValueError, match="guided_decoding"):
        SamplingParams(structured_outputs=form, guided_decoding=form)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 1}, "min_tokens"),
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"structured_outputs": {"schema": {}}}, "schema"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
    ],
)
def test_wrong_structured_outputs_are_refused_by_name(changes, name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    "changes", [{"structured_outputs": {"json_object": True}}, {"thinking_token_budget": 5}]
)
def test_grammars_need_the_last_rung(changes):
    assert BIAS in SamplingParams(temperature=0, **changes).features


@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, GREEDY),
        ({"temperature": 9e-6, "top_k": 5}, GREEDY),
        ({"temperature": 1.1e-5}, SAMPLED),
        ({}, SAMPLED),
        ({"top_k": 0}, SAMPLED),
        ({"top_k": 1}, TOP_K),
        ({"top_k": 128, "top_p": 0.5}, TOP_K),
        ({"top_k": 129}, FULL),
        ({"top_p": 0.99}, FULL),
        ({"logprobs": 0}, SAMPLED | SamplingFeatures.of(LOGPROBS)),
        ({"temperature": 0.0, "prompt_logprobs": 0}, SamplingFeatures.of(PROMPT_LOGPROBS)),
    ],
)
def test_the_sampler_is_the_least_that_can_serve_the_request(changes, features):
    assert SamplingParams(**changes).features == features


@pytest.mark.parametrize("steps", [-3, -1, 0, 1, 3])
def test_host_and_device_agree_on_what_is_greedy(steps):
    """Around the bound by float32's own steps, and by a tenth of one, which float32 rounds away."""
    bound = np.float32(GREEDY_BELOW)
    for fraction in (0.0, 0.1, -0.1):
        temperature = float(bound) + (steps + fraction) * float(np.spacing(bound))
        on_device = bool(jnp.float32(temperature) < GREEDY_BELOW)  # as sampling/params.py asks
        assert SamplingParams(temperature=temperature).is_greedy == on_device
