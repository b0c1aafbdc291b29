"""Options: written once, shown in four places, and checked when an `EngineConfig` is built."""

import dataclasses
import inspect
import itertools
import math
import re

import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SpeculativeConfig
from jaxspec.options.engine_options import OPTIONS, EngineConfig, default_of, meaning
from jaxspec.plan.step_shapes import ModelSizes, SchedulerLimits, StepShapes
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
        ({"steps_per_dispatch": 1.5}, "least 1, got 1.5, which is not 'auto' either."),
        ({"steps_per_dispatch": "all"}, "steps_per_dispatch must be an integer of at least 1"),
        ({"max_step_ms": 0}, "max_step_ms must be above 0, got 0.0."),
        ({"prefix_cache_share": 1}, "prefix_cache_share must be in [0, 1), got 1.0"),
        ({"kv_offloading_size": -1}, "kv_offloading_size must be at least 0 GiB, got -1.0"),
        ({"kv_offloading_size": float("inf")}, "kv_offloading_size must be a finite number"),
        ({"prefix_cache_share": -0.1}, "prefix_cache_share must be in [0, 1), got -0.1"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode must be "),
        ({"checkpoint_interval": 0}, "checkpoint_interval must be an integer of at least 1, got 0"),
        ({"speculative_config": "magic"}, "Unknown speculative method 'magic'"),
        ({"speculative_config": {"draft_vocab": 0}}, "draft_vocab must be an integer"),
        (
            {"speculative_config": 3},
            "speculative_config must be 'auto', None, a dict or one of ['mtp'",
        ),
        ({"model": 3}, "model must be a text or a Path, got 3."),
        ({"model": ""}, "model must be a path of 1 to 4,096 characters that a file system knows"),
        ({"load_format": ["auto"]}, "load_format must be 'auto' or 'dummy', got ['auto']."),
        ({"dtype": np.zeros(2)}, "dtype must be 'float32', 'bfloat16' or 'auto', got array"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer of at least 1, got True."),
        ({"max_num_seqs": 10**5000}, "max_num_seqs must be at most 16,777,216, got an integer of"),
        ({"max_model_len": "a"}, "max_model_len must be an integer of at least 1, got 'a'."),
        ({"max_in_flight": True}, "max_in_flight must be an integer of at least 0, got True."),
        ({"max_in_flight": -1}, "max_in_flight must be an integer of at least 0, got -1."),
        ({"num_pages": 2.0}, "num_pages must be an integer of at least 1, got 2.0."),
        ({"gpu_memory_utilization": "a"}, "gpu_memory_utilization must be a finite number, got "),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization must be a finite number"),
        ({"decode_buckets": 5}, "decode_buckets must be a list of at most 1024 sizes, got 5."),
        ({"decode_buckets": "abc"}, "decode_buckets must be a list of at most 1024 sizes, got "),
        ({"decode_buckets": [1.5]}, "Each of decode_buckets must be an integer of at least 1, go"),
        ({"decode_buckets": [[1]]}, "Each of decode_buckets must be an integer of at least 1, go"),
        ({"prefill_buckets": itertools.count(1)}, "prefill_buckets must be a list of at most 102"),
        ({"seed": "x"}, "seed must be an integer that fits in 64 bits, got 'x'."),
        ({"seed": 2**64}, "seed must be an integer that fits in 64 bits, got 184467440737095516"),
        ({"compilation_cache": 3}, "compilation_cache must be a text or a Path, got 3."),
        ({"deterministic": 1}, "deterministic must be True or False, got 1."),
        (
            {"deterministic": True, "state_policy": "replay"},
            "deterministic=True needs state_policy='snapshot' or 'auto', got 'replay': the sums of "
            "a replay depend on its ring. Change state_policy, or leave deterministic out.",
        ),
        (
            {"deterministic": True, "tensor_parallel_size": 2},
            "deterministic=True needs tensor_parallel_size=1, got 2: the order in which devices",
        ),
        (
            {"deterministic": True, "activation_dtype": "float8_e4m3fn"},
            "deterministic=True needs activation_dtype=None, got 'float8_e4m3fn': no law covers",
        ),
        ({"show_progress": "yes"}, "show_progress must be True or False, got 'yes'."),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, dict) else None,
)
def test_what_needs_no_model_is_refused_when_a_configuration_is_built(options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        EngineConfig(**options)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_refuses_what_is_of_no_type(name):
    with pytest.raises(ValueError, match=f"{name} must be .*got <object object at"):
        EngineConfig(**{name: object()})
    EngineConfig(**{name: OPTIONS[name].default})


def test_numbers_of_numpy_are_kept_as_pythons():
    python = EngineConfig(
        max_num_seqs=4,
        max_in_flight=0,
        gpu_memory_utilization=0.5,
        decode_buckets=[1, 4],
        seed=-3,
        show_progress=True,
    )
    numpy = EngineConfig(
        max_num_seqs=np.int32(4),
        max_in_flight=np.uint8(0),
        gpu_memory_utilization=np.float16(0.5),
        decode_buckets=np.array([1, 4]),
        seed=np.int64(-3),
        show_progress=np.True_,
    )
    assert numpy == python and repr(numpy) == repr(python) and hash(numpy) == hash(python)


def test_a_configuration_is_frozen_and_equal_options_make_equal_ones():
    lists = {"decode_buckets": [1, 8], "speculative_config": {"draft_vocab": [3, 4]}}
    config = EngineConfig(**lists)
    assert config == EngineConfig(
        decode_buckets=(1, 8), speculative_config=config.speculative_config
    )
    assert config.speculative_config == SpeculativeConfig.of({"draft_vocab": [3, 4]})
    assert len({config, EngineConfig(**lists), EngineConfig()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


@pytest.mark.parametrize(
    ("asked", "positions", "length"), [(None, 100, 100), (None, 99999, 8192), (64, 100, 64)]
)
def test_samples_are_as_long_as_the_model_allows(asked, positions, length):
    shapes, _ = EngineConfig(max_model_len=asked).sizes(ModelSizes(positions), draft_buckets=(3,))
    assert shapes.max_model_len == length
    with pytest.raises(ValueError, match="must not exceed the model's 100 positions, got 101"):
        EngineConfig(max_model_len=101).sizes(ModelSizes(100), draft_buckets=(3,))


def test_every_size_reaches_the_shapes():
    sizes = {
        "max_num_seqs": 6,
        "page_size": 8,
        "num_pages": 33,
        "max_prefill_seqs": 3,
        "steps_per_dispatch": 5,
    }
    limits = {"max_num_batched_tokens": 99, "long_prefill_token_threshold": 17, "max_step_ms": 8.0}
    config = EngineConfig(
        **sizes, **limits, decode_buckets=[2, 6], prefill_buckets=[48], max_model_len=80
    )
    want = StepShapes(
        **sizes, max_model_len=80, num_drafts=2, decode_rows=(2, 6), prefill_tokens=(48,)
    )
    assert config.sizes(ModelSizes(100), draft_buckets=(2,)) == (want, SchedulerLimits(**limits))
    own = ModelSizes(100, steps_per_dispatch=4)
    assert config.sizes(own, draft_buckets=(2,))[0].steps_per_dispatch == 5
    assert EngineConfig().sizes(own, draft_buckets=(2,))[0].steps_per_dispatch == 4


def sizes_of(tokens_per_step=512, **options):
    """The sizes of a model with 3 drafts."""
    config = EngineConfig(
        **{"max_num_seqs": 8, "max_model_len": 100, "max_prefill_seqs": 4} | options
    )
    return config.sizes(ModelSizes(10**6, tokens_per_step), draft_buckets=(3,))


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 4)), (8, (1, 4, 8)), (64, (1, 4, 16, 64))],
)
def test_default_decode_buckets_end_in_all_rows(max_num_seqs, sizes):
    buckets, limits = sizes_of(max_num_seqs=max_num_seqs)
    assert buckets.decode_rows == sizes
    assert buckets.num_pages == 7 * max_num_seqs + 1
    assert limits.max_num_batched_tokens == 512 + 4 * max_num_seqs


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (7, (7,)),
        (64, (64,)),
        (600, (64, 600)),
        (2047, (64, 2047)),
        (2048, (64, 256, 512, 2048)),
        (2049, (64, 256, 512, 2048, 2049)),
    ],
)
def test_default_prefill_buckets_end_in_the_budget_that_is_given(budget, sizes):
    shapes, _ = sizes_of(max_num_seqs=1, max_num_batched_tokens=budget)
    assert shapes.prefill_tokens == sizes


@pytest.mark.parametrize(
    ("tokens_per_step", "max_model_len", "sizes"),
    [
        (512, 8192, (64, 512)),
        (4096, 8192, (64, 256, 512, 2048, 4096)),
        (2560, 8192, (64, 256, 512, 2048, 2560)),
        (4096, 500, (64, 256, 512, 2048)),  # what 4 prompts may have, in full 64s
        (4096, 10, (64, 512)),
    ],
)
def test_a_model_has_its_own_default_of_tokens_a_step(tokens_per_step, max_model_len, sizes):
    own = {"tokens_per_step": tokens_per_step, "max_model_len": max_model_len}
    shapes, limits = sizes_of(**own)
    verify = 8 * 4  # of all rows, beside which there is room for the prompts
    assert (shapes.prefill_tokens, limits.max_num_batched_tokens) == (sizes, sizes[-1] + verify)
    alone, limits = sizes_of(**own, max_prefill_seqs=1)
    longest = max(512, min(tokens_per_step, -(-max_model_len // 64) * 64))
    assert alone.prefill_tokens[-1] == longest == limits.max_num_batched_tokens - verify
    given, _ = sizes_of(**own, max_num_batched_tokens=300)
    assert given.prefill_tokens == (64, 300)
    many = {"max_num_seqs": 1000, "max_num_batched_tokens": None}
    assert sizes_of(**own, **many)[0].prefill_tokens == sizes


def test_what_is_given_is_no_default():
    buckets, _ = sizes_of(decode_buckets=[2, 8], prefill_buckets=[16], num_pages=9)
    assert (buckets.decode_rows, buckets.prefill_tokens, buckets.num_pages) == ((2, 8), (16,), 9)
    _, many = sizes_of(max_num_seqs=100)
    assert many.max_num_batched_tokens == 512 + 100 * 4
    for option in ("decode_buckets", "prefill_buckets"):
        with pytest.raises(ValueError, match=f"{option} must ascend"):
            sizes_of(**{option: [8, 4]})
    with pytest.raises(ValueError, match="max_num_batched_tokens=32 must exceed .* = 32"):
        sizes_of(max_num_batched_tokens=32)


HIDDEN = {"method": "extract_hidden_states", "layers": [0], "folder": "states"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nnodes": 2}, "tensor_parallel_size"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "node_rank"),
        ({"node_rank": 1}, "node_rank"),
        ({"master_port": 65536}, "master_port"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "kv_offloading_size": 1.0}, "kv_offloading_size"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "speculative_config": HIDDEN}, "nnodes"),
    ],
)
def test_options_of_nodes_are_consistent(options, named):
    with pytest.raises(ValueError, match=f"^{named} must|{named}="):
        EngineConfig.of(None, options)
