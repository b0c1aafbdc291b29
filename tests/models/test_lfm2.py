"""LFM2 and its config.json in both spellings; LFM2-MoE against its equations."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import Oracle
from safetensors.numpy import load_file, save_file

from jaxspec.models import load_model, parse_config
from jaxspec.models.config import DENSE, FULL_ATTENTION, SHORT_CONV, SPARSE
from jaxspec.models.layers.moe import MoEConfig

NAME = "lfm2"
# The fields that jaxspec reads of LFM2-1.2B's first config.json, and some that it does not.
PUBLISHED = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
# Likewise of LFM2-8B-A1B's.
EXPERTS = {
    "model_type": "lfm2_moe",
    "architectures": ["Lfm2MoeForCausalLM"],
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_the_published_config_means_the_same(fixture_folder, tmp_path):
    """Layers that attend by their indices, the width before its adjustment, other names."""
    folder = fixture_folder(NAME)
    shutil.copy(folder / "model.safetensors", tmp_path)
    shutil.copy(fixture_folder("lfm2_raw") / "config.json", tmp_path)
    one, other = load_model(tmp_path, jnp.float32), load_model(folder, jnp.float32)
    assert one.config == other.config
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def expert_checkpoint(folder, fixture_folder, **changes):
    """The fixture with experts, drawn at random, in all layers but the first."""
    shutil.copytree(fixture_folder(NAME), folder)
    config = json.loads((folder / "config.json").read_text()) | EXPERTS
    config |= {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8}
    config |= {"num_experts_per_tok": 3, "num_dense_layers": 1, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    held, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for layer in (1, 2, 3):
        prefix = f"model.layers.{layer}.feed_forward."
        held = {name: x for name, x in held.items() if not name.startswith(prefix)}
        drawn = {"gate": (8, 64)}
        for expert in range(8):
            drawn |= {f"experts.{expert}.{name}": (32, 64) for name in ("w1", "w3")}
            drawn |= {f"experts.{expert}.w2": (64, 32)}
        for name, shape in drawn.items():
            values = rng.normal(size=shape) / np.sqrt(shape[1])
            held[f"{prefix}{name}.weight"] = values.astype(np.float32)
        if config["use_expert_bias"]:
            held[prefix + "expert_bias"] = rng.normal(size=8).astype(np.float32) / 4
    save_file(held, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5}],
    ids=["corrected", "neither corrected nor renormalised"],
)
def test_experts_are_those_of_the_equations(changes, tmp_path, fixture_folder, single_request):
    folder = expert_checkpoint(tmp_path / "model", fixture_folder, **changes)
    model = load_model(folder, jnp.float32)
    assert model.config.feed_forward_types == (DENSE, SPARSE, SPARSE, SPARSE)
    run, ids = Oracle(folder).start(), np.arange(3, 250, 11)
    expected = np.stack([run.feed(int(token)) for token in ids])
    _, logits = single_request(model).prefill(ids, 9)
    assert_close(logits, expected, 2e-4)


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    attending = [i for i, kind in enumerate(config.layer_types) if kind == FULL_ATTENTION]
    assert attending == [2, 5, 8, 10, 12, 14] and config.layer_types.count(SHORT_CONV) == 10
    assert (config.head_dim, config.rms_norm_eps, config.rope.theta) == (64, 1e-5, 1e6)
    assert config.normed_heads and config.is_tied({"model.embed_tokens.weight"})


def test_a_published_configuration_of_experts_is_read():
    config = parse_config(PUBLISHED | EXPERTS)
    assert config.feed_forward_types == (DENSE,) * 2 + (SPARSE,) * 14
    assert config.intermediate_size == 7168  # it is not adjusted where there are experts
    sizes = config.part(MoEConfig)
    assert sizes.intermediate_size == 1792 and sizes.has_correction and not sizes.shared_size
    assert (sizes.routing.score, sizes.routing.eps) == ("sigmoid", 1e-6)


@pytest.mark.parametrize(
    ("published", "width"),
    [
        ({"block_ff_dim": 12288}, 8192),  # 1.2B
        ({"block_ff_dim": 10240}, 6912),  # 700M
        ({"block_ff_dim": 6656}, 4608),  # 350M
        ({"block_ff_dim": 10752, "block_auto_adjust_ff_dim": False}, 10752),  # 2.6B
        ({"block_ff_dim": 12288, "intermediate_size": 8192}, 8192),  # the former counts
        ({"block_ff_dim": None, "intermediate_size": 12288}, 8192),
        ({"block_ffn_dim_multiplier": 1.3}, 10752),
        ({"block_ffn_dim_multiplier": None}, 8192),
    ],
)
def test_the_width_is_adjusted_as_the_configuration_asks(published, width):
    assert parse_config(PUBLISHED | published).intermediate_size == width


@pytest.mark.parametrize(
    ("flags", "tied"),
    [
        ({}, True),
        ({"tie_embedding": True}, True),
        ({"tie_embedding": False}, False),
        ({"tie_word_embeddings": False}, False),
        ({"tie_embedding": True, "tie_word_embeddings": False}, True),
    ],
)
def test_either_flag_tells_whether_embeddings_are_tied(flags, tied):
    assert parse_config(PUBLISHED | flags).is_tied(()) == tied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Lfm3ForCausalLM"]}, "'Lfm3ForCausalLM' .*and jaxspec runs only"),
        ({"conv_bias": True}, "`conv_bias` must be False, got True"),
        ({"conv_L_cache": 1}, "`conv_L_cache` must be an integer from 2"),
        ({"use_pos_enc": False}, "`use_pos_enc` must be True, got False"),
        ({"full_attn_idxs": [16]}, "`full_attn_idxs` must be a list of .* from 0 to 15"),
        ({"full_attn_idxs": None}, "must give `full_attn_idxs`, and does not"),
        ({"layer_types": ["conv"] * 15}, "each of 16 layers; it has 15 entries\\. Take"),
        ({"layer_types": ["conv", "sliding"] * 8}, "and the unknown kinds \\['sliding'\\]\\. Take"),
        ({"block_auto_adjust_ff_dim": None}, "must give `block_auto_adjust_ff_dim`"),
        ({**EXPERTS, "num_dense_layers": 17}, "`num_dense_layers` must be an integer from 0 to 16"),
        ({**EXPERTS, "num_experts_per_tok": 33}, "`num_experts_per_tok` must be an integer from 1"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)
