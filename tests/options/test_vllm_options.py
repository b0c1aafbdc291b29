"""vLLM's options: what they are here, and which of their values are refused."""

import typing

import pytest

from jaxspec.options.engine_options import OPTIONS, EngineConfig
from jaxspec.options.vllm_options import (
    CALL_ARGUMENTS,
    RENAMED,
    UNDERSTOOD,
    check_call,
    translated,
    without_neutral,
)
from jaxspec.text.parsers import REASONING_PARSERS


def test_the_tables_and_the_options_do_not_overlap():
    assert not set(UNDERSTOOD) & {*OPTIONS, *RENAMED}
    assert {renamed.name for renamed in RENAMED.values()} <= set(OPTIONS)
    assert all(RENAMED[name].name == name for name in set(RENAMED) & set(OPTIONS))


def test_each_line_says_what_is_so_and_ends_as_a_sentence_can():
    for name, given in UNDERSTOOD.items():
        assert given.meaning and not given.meaning.endswith("."), name
        assert given.instead and not given.instead.endswith("."), name
        assert "|" not in given.meaning + given.instead


@pytest.mark.parametrize("name", [name for name, given in UNDERSTOOD.items() if given.values])
def test_values_that_mean_the_default_are_taken_and_others_refused_by_name(name):
    for value in UNDERSTOOD[name].values:
        assert EngineConfig.of(None, {name: value}) == EngineConfig()
    for wrong in (object(), "something else", 2, [1], {"a": object()}, 1.5):
        with pytest.raises(ValueError, match=f"^{name} must be .* with jaxspec .*, got ") as caught:
            EngineConfig.of(None, {name: wrong})
        assert len(str(caught.value)) < 500 and str(caught.value).endswith(".")


@pytest.mark.parametrize("name", [name for name, given in UNDERSTOOD.items() if given.parts])
def test_entries_of_a_dict_are_taken_one_by_one(name):
    parts = UNDERSTOOD[name].parts
    for key, values in parts.items():
        for value in values:
            own = {key: value} if key in OPTIONS and value else {}
            assert EngineConfig.of(None, {name: {key: value}}) == EngineConfig(**own)
        for wrong in ({key: "something else"}, {key: None}, {key: values[0], "other": 1}):
            with pytest.raises(ValueError, match=f"^{name} must be .*{key}"):
                EngineConfig.of(None, {name: wrong})
    assert EngineConfig.of(None, {name: {key: v[0] for key, v in parts.items()}}) == EngineConfig()


def test_a_reasoning_parser_is_one_option_under_two_names():
    config, name = {"structured_outputs_config": {"reasoning_parser": "qwen3"}}, "reasoning_parser"
    assert typing.get_args(typing.get_args(OPTIONS[name].type)[0]) == REASONING_PARSERS
    for given in (config, {name: "qwen3"}, config | {name: "qwen3"}, config | {name: None}):
        assert EngineConfig.of(None, given).reasoning_parser == "qwen3"
    with pytest.raises(ValueError, match="reasoning_parser must be given once"):
        EngineConfig.of(None, config | {name: "mimo"})


def test_one_is_no_true():
    with pytest.raises(ValueError, match="trust_remote_code must be False or True .*, got 0"):
        translated({"trust_remote_code": 0})
    with pytest.raises(ValueError, match="pipeline_parallel_size must be 1 .*, got True"):
        translated({"pipeline_parallel_size": True})


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        ({"block_size": 32}, {"page_size": 32}),
        ({"kv_cache_dtype": "auto"}, {}),
        ({"kv_cache_dtype": "fp8"}, {"kv_dtype": "float8_e4m3fn"}),
        ({"kv_cache_dtype": "bfloat16"}, {"kv_dtype": "bfloat16"}),
        ({"mamba_ssm_cache_dtype": "float16"}, {"state_dtype": "float16"}),
        ({"num_gpu_blocks_override": None}, {}),
        ({"num_gpu_blocks_override": 9}, {"num_pages": 9}),
        ({"load_format": "safetensors"}, {}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"quantization": "gptq_marlin"}, {"quantization": "gptq"}),
        ({"quantization": "inc"}, {"quantization": "auto-round"}),
        ({"quantization": "modelopt_fp4"}, {"quantization": "modelopt"}),
        ({"use_tqdm_on_load": False}, {"show_progress": False}),
    ],
)
def test_another_name_is_the_option_itself(theirs, own):
    assert EngineConfig.of(None, theirs) == EngineConfig(**own)


def test_an_option_under_two_names_and_a_wrong_value_of_another_name_are_refused():
    with pytest.raises(ValueError, match="block_size is another name of page_size, got both: 8 an"):
        translated({"block_size": 8, "page_size": 16})
    with pytest.raises(ValueError, match="page_size must be an integer of at least 1, got 'a'"):
        EngineConfig.of(None, {"block_size": "a"})
    with pytest.raises(ValueError, match="quantization must be 'dequantise', .* got 'bitsandb"):
        EngineConfig.of(None, {"quantization": "bitsandbytes"})
    with pytest.raises(ValueError, match="calculate_kv_scales must be False"):
        EngineConfig.of(None, {"calculate_kv_scales": True})


def test_a_word_close_to_one_of_vllms_is_led_there():
    with pytest.raises(TypeError, match="no option 'tensor_parallel'; the nearest is 'tensor_para"):
        EngineConfig.of(None, {"tensor_parallel": 2})


def test_options_without_an_effect_are_named_in_one_line(caplog):
    given = {"trust_remote_code": True, "limit_mm_per_prompt": {"image": 2}, "block_size": 8}
    quiet = {"tensor_parallel_size": 1, "swap_space": 0, "hf_token": None, "enforce_eager": False}
    assert EngineConfig.of(None, given | quiet) == EngineConfig(page_size=8)
    (line,) = caplog.messages
    assert "trust_remote_code" in line and "limit_mm_per_prompt" in line
    assert not any(name in line for name in quiet)


def test_defaults_of_vllm_are_passed_without_a_word(caplog):
    defaults = {name: given.values[0] for name, given in UNDERSTOOD.items() if given.values}
    assert EngineConfig.of(None, defaults) == EngineConfig() and not caplog.messages


@pytest.mark.parametrize("word", ["float16", "half"])
def test_float16_is_refused_with_the_dtype_to_use(word):
    with pytest.raises(ValueError, match=f"^dtype must be .*, got '{word}': .* Use 'bfloat16'"):
        EngineConfig.of(None, {"dtype": word})


@pytest.mark.parametrize("name", CALL_ARGUMENTS)
def test_arguments_of_calls_ask_for_nothing_or_are_refused_by_name(name):
    for value in CALL_ARGUMENTS[name].values:
        assert without_neutral({name: value, "tools": []}) == {"tools": []}
        check_call("generate", {name: value})
    with pytest.raises(ValueError, match=f"^{name} must be .* with jaxspec"):
        check_call("generate", {name: object()})


def test_other_arguments_of_calls_are_unknown():
    with pytest.raises(TypeError, match=r"generate\(\) has no argument 'prompt'"):
        check_call("generate", {"prompt": None, "lora_request": None})
