"""What a call without parameters does, as a checkpoint's generation_config.json says."""

import json

import pytest

from jaxspec.options.generation_config import default_params
from jaxspec.requests.sampling_params import SamplingParams


@pytest.fixture
def folder(tmp_path):
    def write(content):
        path = tmp_path / "generation_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("published", "fields"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"top_k": 20, "max_new_tokens": 7}, {"top_k": 20, "max_tokens": 7}),
        ({"temperature": None, "top_k": 0}, {"top_k": 0}),
        ({"do_sample": True, "eos_token_id": [1, 2], "num_beams": 4, "length_penalty": 2.0}, {}),
        ({"stop_strings": ["a"], "max_length": 20}, {}),
    ],
)
def test_its_fields_are_taken_as_vllm_takes_them(published, fields, folder, tmp_path):
    own = folder(published)
    assert default_params("auto", own) == SamplingParams(**fields)
    assert default_params(own, tmp_path / "elsewhere") == SamplingParams(**fields)
    assert default_params("vllm", own) == SamplingParams()


def test_without_the_file_the_defaults_are_those_of_sampling_params(tmp_path):
    assert default_params("auto", tmp_path) == SamplingParams()
    with pytest.raises(FileNotFoundError, match="generation_config must be 'auto', 'vllm' or a"):
        default_params(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "generation_config.json must be JSON"),
        ({"temperature": "warm"}, "generation_config.json: temperature must be a number .* 'warm'"),
        ({"top_k": 2.5}, "top_k must be an integer .* Pass generation_config='vllm' to do without"),
        ({"max_new_tokens": True}, "generation_config.json: max_tokens must be an integer"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_the_file_s_name(content, message, folder):
    with pytest.raises(ValueError, match=message):
        default_params("auto", folder(content))
