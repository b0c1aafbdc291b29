"""ModelConfig: the parts of layers, and what the tensors say of a tied head."""

import dataclasses
import json

import pytest

from jaxspec.models import parse_config
from jaxspec.models.layers.gated_delta_net import GatedDeltaNetConfig


def test_another_familys_config_has_no_parts_of_a_recurrent_layer(fixture_folder):
    config = parse_config(json.loads((fixture_folder("qwen3") / "config.json").read_text()))
    assert config.parts == () and not (config.gated_attention or config.zero_centred_norms)
    assert config.rope.rotary_dim == config.head_dim
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM was read without .* parse_config"):
        config.part(GatedDeltaNetConfig)
    assert config.find_part(GatedDeltaNetConfig) is None
    hybrid = parse_config(json.loads((fixture_folder("qwen3_5") / "config.json").read_text()))
    assert hybrid.find_part(GatedDeltaNetConfig) is hybrid.part(GatedDeltaNetConfig)


@pytest.mark.parametrize(
    ("flag", "tensors", "tied"),
    [
        (None, [], True),
        (True, [], True),
        (False, [], False),  # then the head is missing
        (None, ["lm_head.weight"], False),
        (True, ["lm_head.weight"], False),  # what is stored is used
    ],
)
def test_the_head_is_the_embedding_where_no_tensor_is_of_its_own(
    fixture_folder, flag, tensors, tied
):
    config = parse_config(json.loads((fixture_folder("qwen3") / "config.json").read_text()))
    assert dataclasses.replace(config, tie_word_embeddings=flag).is_tied(tensors) is tied
