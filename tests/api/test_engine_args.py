"""Options as one value, for scripts written for vLLM."""

import dataclasses

import pytest

import jaxspec
from jaxspec import AsyncEngineArgs, EngineArgs, SpeculativeConfig
from jaxspec.options.engine_options import EngineConfig


def test_options_are_read_under_both_names_and_given_on_whole():
    args = EngineArgs("folder", block_size=8, max_num_seqs=3, speculative_config="ngram")
    assert (args.page_size, args.max_num_seqs) == (8, 3)
    assert args.speculative_config == SpeculativeConfig(method="ngram")
    own = EngineConfig(**args.options())
    assert own == EngineConfig(**dataclasses.asdict(args))
    assert args.options() == {field.name: getattr(own, field.name) for field in FIELDS}


FIELDS = dataclasses.fields(EngineConfig)


def test_those_of_an_async_engine_have_the_limits_of_its_queue():
    args = AsyncEngineArgs(max_num_queued_reqs=5, stream_interval=2, max_num_seqs=3)
    given = args.options()
    assert {name: given.pop(name) for name in ("max_num_queued_reqs", "stream_interval")} == {
        "max_num_queued_reqs": 5,
        "stream_interval": 2,
    }
    assert given.pop("max_num_queued_tokens") is given.pop("queue_timeout") is None
    assert given == EngineArgs(max_num_seqs=3).options()


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_wrong_options_are_refused_before_a_model_is_loaded(kind):
    with pytest.raises(TypeError, match="no option 'max_num_seq'"):
        kind(max_num_seq=3)
    with pytest.raises(ValueError, match="max_num_seqs must be"):
        kind(max_num_seqs=0)
    with pytest.raises(ValueError, match="pipeline_parallel_size must be 1"):
        kind(pipeline_parallel_size=2)
    for wrong in (0, -1, True, 1.5, "two"):
        with pytest.raises(ValueError, match="data_parallel_size must be"):
            kind(data_parallel_size=wrong)
    assert kind(data_parallel_size=2).options()["data_parallel_size"] == 2


def test_the_package_has_vllms_names():
    assert jaxspec.AsyncLLMEngine is jaxspec.AsyncLLM
    assert issubclass(jaxspec.LLM, jaxspec.LLMEngine)
    assert jaxspec.__version__ and isinstance(jaxspec.__version__, str)
