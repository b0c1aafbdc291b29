"""config.json in every published spelling, and refusals that name the field."""

import json

import pytest

from jaxspec.models import parse_config
from jaxspec.models.fields import read_fields
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


def test_a_family_without_recurrent_layers_refuses_them(published):
    published["architectures"] = ["Qwen3ForCausalLM"]
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has att.* only, but .* name 3 rec"):
        parse_config(published)


def test_a_configuration_of_the_older_spelling_is_read():
    """The fields that jaxspec reads of Qwen3-8B's, and some that it does not."""
    config = parse_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "model_type": "qwen3",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"eos_token_id": [151645, 151643], "temperature": 0.6},
    )
    assert config.layer_types == ("full_attention",) * 36
    assert (config.rope.theta, config.rope.rotary_dim) == (1e6, 128)
    assert config.eos_token_ids == (151645, 151643)


def test_an_end_of_the_text_is_in_the_vocabulary(published):
    with pytest.raises(
        ValueError, match=r"`eos_token_id` must be in .* 0 to 263, got \[264\]\. Take"
    ):
        parse_config(published, {"eos_token_id": [263, 264]})


def test_a_head_of_the_default_size_shares_the_channels_evenly(published):
    del published["head_dim"]
    assert parse_config(published).head_dim == 16
    published["hidden_size"] = 66
    with pytest.raises(
        ValueError, match="must give `head_dim`, because hidden_size 66 is not a mu"
    ):
        parse_config(published)


def test_a_scaling_beside_other_rope_parameters_is_not_passed_over(published):
    published["rope_scaling"] = {"type": "dynamic", "factor": 4.0}
    with pytest.raises(ValueError, match="rope_scaling.type`, the rope type, .*, got 'dynamic'"):
        parse_config(published)


def test_a_null_in_a_nested_config_hides_nothing(published):
    nested = {**published, "quantization_config": {"quant_method": "hqq"}}
    nested["text_config"] = {**published, "quantization_config": None}
    with pytest.raises(ValueError, match="`quantization_config.quant_method` must be .*'hqq'"):
        parse_config(nested)


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
        ("quantization_config", {"quant_method": "hqq"}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
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


def test_yarn_lengthens_the_context(published):
    del published["rope_parameters"]
    published["rope_theta"], published["max_position_embeddings"] = 1e4, 64
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse_config({**published, "rope_scaling": yarn}).max_position_embeddings == 256
    published["max_position_embeddings"] = 1024
    assert parse_config({**published, "rope_scaling": yarn}).max_position_embeddings == 1024
