"""Logits processors of an engine: imported, checked before weights are read, given to requests."""

import dataclasses
import pickle

import jax.numpy as jnp
import pytest
from walks import ALL, Failing, HostWalk, Late, Walk

from jaxspec import LLM, HostLogitsProcessor, LogitsProcessor
from jaxspec.api.logits_processors import LogitsProcessors
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams

VOCAB = 32


@dataclasses.dataclass(frozen=True)
class Own(LogitsProcessor):
    """What it returns, and its attributes, are those of the test."""

    result: str = "logits"
    params: tuple = ("own",)
    window: int = 0

    def __call__(self, logits, prefix, params):
        return eval(self.result)


class Needy(HostLogitsProcessor):
    params = ("needy",)

    def __init__(self, value):
        self.value = value

    def __call__(self, prompt_ids, output_ids, args):
        return None


def test_places_and_classes_become_instances_in_their_order():
    found = LogitsProcessors.of(["walks:Late", Walk, HostWalk(), "walks:SOFT"], VOCAB)
    assert found.device[1:] == (Walk(), ALL[1]) and isinstance(found.device[0], Late)
    assert found.params.device[0] == ("Late", ("late",))
    assert found.params.host == (("HostWalk", ("host_modulus", "host_offset")),)
    assert found.sizes(4) == {"processor_params": 5, "processor_tokens": 4}
    assert found.sizes(1) == {"processor_params": 5, "processor_tokens": 2}
    assert LogitsProcessors.of(None, VOCAB) == LogitsProcessors()
    assert LogitsProcessors().sizes(4) == LogitsProcessors.of([Failing], VOCAB).sizes(4) == {}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["walks:Nothing"], "'walks:Nothing' must be importable.*Nothing"),
        (["no_such_module:a"], "no_such_module"),
        (["walks:walk"], "Each of logits_processors must be"),
        ([Needy], "Needy.*value"),
        ([Walk(), "walks:Walk"], "different params, got 'modulus' of both Walk and Walk"),
        ([Own(params=())], "params of the logits processor Own must be"),
        ([Own(params=("a", "a"))], "params of the logits processor Own must be"),
        ([Own(window=-1)], "window of the logits processor Own must be"),
        ([Own(window=5000)], "window of the logits processor Own must be"),
        ([Own("logits[1:]")], r"Own must return float32 \[32\]"),
        ([Own("logits.astype(jnp.bfloat16)")], r"Own must return float32 \[32\]"),
        ([Own("None")], r"Own must return float32 \[32\].*got None"),
        ([Own("float(logits[0])")], "Own must be a JAX function .* can't be traced"),
    ],
)
def test_processors_that_no_program_can_have_are_refused(entries, message):
    assert jnp.bfloat16  # for the texts above
    with pytest.raises(ValueError, match=message):
        LogitsProcessors.of(entries, VOCAB)


def test_a_class_whose_instances_have_no_hash_is_refused():
    @dataclasses.dataclass
    class Unhashable(LogitsProcessor):
        params = ("strength",)

        def __call__(self, logits, prefix, params):
            return logits

    with pytest.raises(ValueError, match="hash"):
        LogitsProcessors.of([Unhashable], 10)


def test_a_request_has_the_filter_of_processors_that_it_uses():
    processors = LogitsProcessors.of([Walk, HostWalk, Failing], VOCAB)

    def filter_of(**extra_args):
        request = Request((1,), SamplingParams(extra_args=extra_args), 0)
        processors.admit(request, VOCAB)
        there = pickle.loads(pickle.dumps(request))  # another process makes its own
        assert there.token_filter is None and there.params == request.params
        return request.token_filter

    assert filter_of() is None and filter_of(modulus=3, offset=1) is None
    assert filter_of(fails_after=3) is not None
    with pytest.raises(ValueError, match=r"extra_args\['modulus'\] must be at least 1"):
        filter_of(modulus=0, offset=1)


def test_an_engine_refuses_them_before_it_loads_weights(short_model):
    with pytest.raises(ValueError, match="can't be traced"):
        LLM(short_model, logits_processors=[Own("float(logits[0])")], load_format="dummy")
