"""config.json in every published spelling, and refusals that name the field."""

import json

import pytest

from jaxspec.models import parse_config
from jaxspec.models.config import read_fields
from jaxspec.models.layers.gated_delta_net import GatedDeltaNetConfig


@pytest.fixture
def published(fixture_folder):
    """A config.json, as a dict to edit."""
    return json.loads((fixture_folder("qwen3_5") / "config.json").read_text())


def test_the_published_values_are_read(published):
    config = parse_config(published, {"eos_token_id": [5, 7]})
    assert config.architecture == "Qwen3_5ForCausalLM"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.rope.theta, config.rope.rotary_dim) == (10000.0, 8)
    assert config.gated_attention and config.zero_centred_norms
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert config.part(GatedDeltaNetConfig).conv_dim == 2 * 2 * 16 + 6 * 24
    assert config.eos_token_ids == (5, 7)
    assert config.tie_word_embeddings is False


def test_another_familys_config_has_no_parts_of_a_recurrent_layer(fixture_folder):
    config = parse_config(json.loads((fixture_folder("qwen3") / "config.json").read_text()))
    assert config.parts == () and not (config.gated_attention or config.zero_centred_norms)
    assert config.rope.rotary_dim == config.head_dim
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM was read without .* parse_config"):
        config.part(GatedDeltaNetConfig)


def test_a_family_without_recurrent_layers_refuses_them(published):
    published["architectures"] = ["Qwen3ForCausalLM"]
    with pytest.raises(ValueError, match="Qwen3 has attention layers only, but .* name 3 rec"):
        parse_config(published)


def test_stop_tokens_are_those_of_both_files_once(published):
    published["eos_token_id"] = 9
    assert parse_config(published, {"eos_token_id": [5, 9]}).eos_token_ids == (5, 9)
    assert parse_config(published).eos_token_ids == (9,)


def test_a_nested_config_means_the_same(published):
    nested = {
        "architectures": published["architectures"],
        "model_type": "qwen3_5",
        "vision_config": {"hidden_size": 16},
        "text_config": {k: v for k, v in published.items() if k != "architectures"},
    }
    assert parse_config(nested) == parse_config(published)


def test_a_tied_flag_on_either_level_counts(published):
    del published["tie_word_embeddings"]
    assert parse_config(published).tie_word_embeddings is None
    nested = {**published, "tie_word_embeddings": False}
    nested["text_config"] = {**published, "tie_word_embeddings": True}
    assert parse_config(nested).tie_word_embeddings is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_gate_type", "sigmoid"),
        ("attn_output_gate", False),
        ("mtp_use_dedicated_embeddings", True),
        ("layer_scale", True),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("layer_types", ["full_attention", "sliding_attention"] * 2),
        ("layer_types", ["full_attention"]),
        ("hidden_size", "64"),
        ("vocab_size", None),
        ("num_key_value_heads", 3),
        ("linear_num_key_heads", 4),
        ("linear_key_head_dim", 0),
    ],
)
def test_what_is_not_implemented_or_malformed_is_refused_by_name(published, name, value):
    if name == "rope_scaling":
        del published["rope_parameters"]
    published[name] = value
    shown = {"rope_parameters": "rope type", "rope_scaling": "rope type"}.get(name, name)
    if name in ("num_key_value_heads", "linear_num_key_heads"):
        shown = "not a multiple of"
    with pytest.raises(ValueError, match=shown):
        parse_config(published)


def test_a_rotary_base_is_never_guessed(published):
    del published["rope_parameters"]
    with pytest.raises(ValueError, match="rope_theta"):
        parse_config(published)


def test_a_config_that_is_not_json_is_named(tmp_path):
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json must"):
            read_fields(tmp_path)
