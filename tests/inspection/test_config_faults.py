"""All faults of a config.json are found, the first of them as loading finds it."""

import json

import pytest
from harness import FIXTURES

from jaxspec.inspection.config_faults import parse
from jaxspec.models import family_of
from jaxspec.models.fields import Fields

# Of two fixtures fields, each changed so that it is refused.
FAULTS = {
    "attention_bias": True,
    "quantization_config": "fp8",
    "hidden_size": "large",
    "vocab_size": -1,
    "rms_norm_eps": None,
    "max_position_embeddings": 0,
    "attn_output_gate": False,
    "mtp_num_hidden_layers": 7,
    "linear_conv_kernel_dim": None,
}
# `num_experts` is read first, so a fault of it must not end the reading.
FAULTS_OF_EXPERTS = {
    "num_experts": "many",
    "num_experts_per_tok": None,
    "moe_intermediate_size": 0,
    "norm_topk_prob": 1,
    "scoring_func": "sigmoid",
    "mlp_only_layers": [-1],
    "vocab_size": "large",
}


def faults_of(fixture="qwen3_5", /, **changes):
    """The faults of a fixture's config.json with changed fields; the first is the loader's."""
    config = json.loads((FIXTURES / fixture / "config.json").read_text())
    fields = Fields(config | changes)
    family = family_of(fields.architecture, "config.json")
    config, faults = parse(family, fields)
    if faults:
        with pytest.raises(ValueError) as caught:
            family.parse_config(fields)
        assert faults[0] == str(caught.value) and config is None
    else:
        assert config == family.parse_config(fields)
    assert len(set(faults)) == len(faults)
    return faults


def test_a_sound_one_has_none():
    assert faults_of() == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_single_fault_is_found_once(name):
    (fault,) = faults_of(**{name: FAULTS[name]})
    assert f"`{name}`" in fault


@pytest.mark.parametrize(
    ("fixture", "faults"), [("qwen3_5", FAULTS), ("qwen3_next", FAULTS_OF_EXPERTS)]
)
def test_each_of_many_is_found_with_the_message_that_it_has_alone(fixture, faults):
    alone = {
        fault for name, value in faults.items() for fault in faults_of(fixture, **{name: value})
    }
    assert set(faults_of(fixture, **faults)) == alone and len(alone) == len(faults)


def test_a_fault_under_the_other_name_of_a_field_hides_no_later_one():
    both, width = faults_of("qwen3_5_moe", num_local_experts=7, moe_intermediate_size=0)
    assert "`num_experts` and `num_local_experts` mean the same" in both
    assert "`moe_intermediate_size`" in width
    other, width = faults_of("qwen3_5_moe", num_local_experts="many", moe_intermediate_size=0)
    assert "`num_local_experts`" in other and "`moe_intermediate_size`" in width


def test_options_in_nested_blocks_are_found():
    rope = {"rope_theta": "big", "rope_type": "default", "factor": 4.0}
    theta, factor = sorted(faults_of(rope_parameters=rope), reverse=True)
    assert "`rope_parameters.rope_theta`" in theta and "`rope_parameters.factor`" in factor


def test_faults_of_a_scaling_are_found_beside_others():
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 0, "low_freq_factor": 1}
    faults = faults_of("llama", rope_parameters=rope, sliding_window=9)
    names = ("factor", "high_freq_factor", "original_max_position_embeddings")
    expected = {f"`rope_parameters.{name}`" for name in names} | {"`sliding_window`"}
    assert len(faults) == 4 and all(any(name in fault for fault in faults) for name in expected)


def test_a_rule_of_several_fields_is_found_beside_an_option():
    bias, groups = faults_of(attention_bias=True, num_key_value_heads=3)
    assert "`attention_bias`" in bias and "not a multiple of 3" in groups


def test_what_only_stands_in_breaks_no_rule():
    """Of 7 key and value heads the number of query heads must be a multiple, and it is absent."""
    (fault,) = faults_of(num_attention_heads=None, num_key_value_heads=7)
    assert "`num_attention_heads`" in fault
