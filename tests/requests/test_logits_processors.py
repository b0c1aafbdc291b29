"""Arguments of logits processors: what a request may give, and what an engine's processors read."""

import dataclasses
import importlib
import pickle

import numpy as np
import pytest
from walks import ALL, HostWalk, Walk

from jaxspec.requests.logits_processors import (
    MAX_EXTRA_ARG,
    MAX_EXTRA_ARGS,
    ProcessorArgs,
    ProcessorParams,
    check_entry,
    place_of,
    source_digest,
)
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_features import BIAS
from jaxspec.requests.sampling_params import SamplingParams

KNOWN = ProcessorParams(
    device=(("Walk", ("modulus", "offset")), ("Late", ("late",))), host=(("Words", ("words",)),)
)


def test_values_are_kept_as_pythons_and_copied():
    given = {"a": np.float32(0.5), "b": [np.int64(3), True, "x"], "c": np.arange(2), "d": np.str_()}
    params = SamplingParams(extra_args=given)
    given["b"].append(4)
    assert params.extra_args == {"a": 0.5, "b": [3, True, "x"], "c": [0, 1], "d": ""}
    assert type(params.extra_args["a"]) is float and type(params.extra_args["d"]) is str
    assert pickle.loads(pickle.dumps(params)) == params == dataclasses.replace(params)
    assert SamplingParams(extra_args={}).extra_args == {} and SamplingParams().extra_args is None


@pytest.mark.parametrize(
    "wrong",
    [
        *([1], "a", 3, {1: 2}),
        *(
            {"a": None},
            {"a": {}},
            {"a": [[1]]},
            {"a": float("nan")},
            {"a": [1, None]},
            {"a": 2**70},
        ),
        *({"a": "x" * (MAX_EXTRA_ARG + 1)}, {"a": [1] * (MAX_EXTRA_ARG + 1)}, {"a": object()}),
        dict.fromkeys(map(str, range(MAX_EXTRA_ARGS + 1)), 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_values_are_refused(wrong):
    with pytest.raises(ValueError, match="^extra_args") as caught:
        SamplingParams(extra_args=wrong)
    assert len(str(caught.value)) < 400


def test_vllms_processors_of_a_request_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"LLM\(logits_processors=.*extra_args"):
        SamplingParams(logits_processors=[lambda ids, logits: logits])
    assert SamplingParams(logits_processors=None) == SamplingParams(logits_processors=[])


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        (None, None),
        ({}, None),
        ({"modulus": 5, "offset": -1}, ProcessorArgs(1, (5.0, -1.0, 0.0))),
        ({"late": 2.5}, ProcessorArgs(2, (0.0, 0.0, 2.5))),
        ({"words": ["a"]}, ProcessorArgs(0, (0.0, 0.0, 0.0))),
        ({"late": 1, "offset": 2, "modulus": 2**24}, ProcessorArgs(3, (2.0**24, 2.0, 1.0))),
    ],
)
def test_arguments_are_in_the_order_of_the_processors(extra_args, expected):
    found = KNOWN.read(SamplingParams(extra_args=extra_args).extra_args)
    assert found == expected
    request = Request((1,), SamplingParams(), 0, processor_args=found)
    assert request.has_tables == (BIAS in request.features) == (expected is not None)


@pytest.mark.parametrize(
    ("extra_args", "named"),
    [
        ({"modulus": 5}, "offset"),
        ({"modulus": 5, "offset": "x"}, r"\['offset'\]"),
        ({"late": True}, r"\['late'\]"),
        ({"late": [1]}, r"\['late'\]"),
        ({"late": 2**24 + 1}, r"\['late'\]"),
        ({"late": 1e39}, r"\['late'\]"),
        ({"lat": 1}, r"Walk \(modulus, offset\), Late \(late\), Words \(words\), got 'lat'"),
    ],
)
def test_arguments_that_no_processor_can_read_are_refused_by_name(extra_args, named):
    with pytest.raises(ValueError, match=f"^extra_args.*{named}"):
        KNOWN.read(extra_args)


def test_an_engine_without_processors_says_so():
    with pytest.raises(ValueError, match="this engine has none, got 'a'"):
        ProcessorParams().read({"a": 1})


def test_entries_are_instances_classes_or_places():
    for entry in (*ALL, Walk, HostWalk, "walks:Walk", "a.b:c.d"):
        assert check_entry(entry) is entry
    assert place_of(Walk()) == place_of(Walk) == place_of("walks:Walk") == "walks:Walk"


def test_a_digest_is_that_of_the_sources_of_the_class_and_its_bases(tmp_path, monkeypatch):
    """So it is another one for another body, of the class or of one that it extends."""
    monkeypatch.syspath_prepend(tmp_path)
    base = "from walks import Walk\nclass Base(Walk):\n    def shift(self):\n        return {}\n"
    digests = [source_digest(Walk()), source_digest(dataclasses.replace(Walk()))]
    for number, (shift, own) in enumerate([(1, 2), (1, 2), (3, 2), (1, 3)]):
        end = f"class Own(Base):\n    step = {own}\n"
        (tmp_path / f"processor_{number}.py").write_text(base.format(shift) + end)
        digests.append(source_digest(importlib.import_module(f"processor_{number}").Own()))
    assert [digests.index(each) for each in digests] == [0, 0, 2, 2, 4, 5]


@dataclasses.dataclass
class Unhashable(Walk.__base__):
    params = ("a",)

    def __call__(self, logits, prefix, params):
        return logits


@pytest.mark.parametrize(
    "wrong", [print, lambda ids, logits: logits, dict, 3, "walks", "", "a:b c"]
)
def test_other_entries_are_refused(wrong):
    with pytest.raises(ValueError, match="Each of logits_processors must be"):
        check_entry(wrong)
    with pytest.raises(ValueError, match="must have a hash"):
        check_entry(Unhashable())
