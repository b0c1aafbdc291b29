"""Options: written once, shown in four places, and checked when an `EngineConfig` is built."""

import dataclasses
import inspect
import re

import pytest

import jaxspec
from jaxspec import LLM, SpeculativeConfig
from jaxspec.config import StepShapes
from jaxspec.options import OPTIONS, EngineConfig, default_of, meaning
from tools.docs import options as page


def test_the_page_of_options_is_what_they_say():
    assert page.PATH.exists() and page.PATH.read_text() == page.page(), f"Run `{page.COMMAND}`."


def test_each_option_says_what_it_is_and_what_none_stands_for():
    for name, field in OPTIONS.items():
        assert meaning(name) and not meaning(name).startswith("of ")
        assert not meaning(name).endswith(".") and "|" not in meaning(name) + default_of(name)
        none = field.metadata["none"]
        assert (none is None) == (field.default is not None), "said where None is the default"


def test_the_signature_and_docstring_of_llm_have_every_option():
    signature = inspect.signature(LLM)
    assert list(signature.parameters) == list(OPTIONS)
    for name, parameter in signature.parameters.items():
        assert parameter.default == OPTIONS[name].default
        assert (parameter.kind is parameter.KEYWORD_ONLY) == (name != "model")
        assert re.search(rf"^        {name}: ", LLM.__doc__, re.MULTILINE)
    words = re.sub(r"\s+", " ", LLM.__doc__)
    assert all(meaning(name) in words and default_of(name) in words for name in OPTIONS)


@pytest.mark.parametrize("make", [LLM, lambda **options: jaxspec.generate("x", **options)])
def test_an_unknown_option_is_refused_with_the_nearest_name(make):
    with pytest.raises(TypeError) as caught:
        make(max_num_seq=3)
    assert str(caught.value) == (
        "LLM has no option 'max_num_seq'; the nearest is 'max_num_seqs'. docs/options.md and "
        "help(LLM) list all of them."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_format": "gguf"}, "load_format must be 'auto' or 'dummy', got 'gguf'."),
        ({"dtype": "int4"}, "dtype must be 'float32', 'bfloat16' or 'auto', got 'int4'."),
        ({"kv_dtype": "fp8"}, "kv_dtype must be 'bfloat16', 'float8_e4m3fn' or None, the model's"),
        ({"state_policy": None}, "state_policy must be 'auto', 'snapshot' or 'replay', got None."),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0."),
        ({"steps_per_dispatch": 1.5}, "steps_per_dispatch must be an integer of at least 1"),
        ({"speculative_config": "mtp"}, "speculative_config must be 'auto', None or a dict"),
        ({"speculative_config": {"draft_vocab": 0}}, "draft_vocab must be an integer"),
    ],
)
def test_what_needs_no_model_is_refused_when_a_configuration_is_built(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EngineConfig(**options)


def test_a_configuration_is_frozen_and_equal_options_make_equal_ones():
    lists = {"decode_buckets": [1, 8], "speculative_config": {"draft_vocab": [3, 4]}}
    config = EngineConfig(**lists)
    assert config == EngineConfig(
        decode_buckets=(1, 8), speculative_config=config.speculative_config
    )
    assert config.speculative_config == SpeculativeConfig(draft_vocab=[3, 4])
    assert len({config, EngineConfig(**lists), EngineConfig()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


@pytest.mark.parametrize(
    ("asked", "positions", "length"), [(None, 100, 100), (None, 99999, 8192), (64, 100, 64)]
)
def test_samples_are_as_long_as_the_model_allows(asked, positions, length):
    shapes = EngineConfig(max_model_len=asked).step_shapes(max_positions=positions, num_drafts=3)
    assert shapes.max_model_len == length
    with pytest.raises(ValueError, match="must not exceed the model's 100 positions, got 101"):
        EngineConfig(max_model_len=101).step_shapes(max_positions=100, num_drafts=3)


def test_every_size_reaches_the_shapes():
    sizes = {
        "max_num_seqs": 6,
        "page_size": 8,
        "num_pages": 33,
        "max_num_batched_tokens": 99,
        "max_prefill_seqs": 3,
        "steps_per_dispatch": 5,
        "long_prefill_token_threshold": 17,
    }
    config = EngineConfig(**sizes, decode_buckets=[2, 6], prefill_buckets=[48], max_model_len=80)
    want = StepShapes(
        **sizes, max_model_len=80, num_drafts=2, decode_rows=(2, 6), prefill_tokens=(48,)
    )
    shapes = config.step_shapes(max_positions=100, num_drafts=2)
    assert dataclasses.asdict(shapes) == dataclasses.asdict(want)
