"""Kimi-Linear and its config.json in both spellings."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.published import MODELS
from jaxspec.models import load_model, parse_config
from jaxspec.models.config import DENSE, KIMI_DELTA, LATENT_ATTENTION, SPARSE
from jaxspec.models.layers.kimi_delta import KimiDeltaConfig
from jaxspec.models.layers.latent_attention import LatentAttentionConfig
from jaxspec.models.layers.moe import MoEConfig

NAME = "kimi_linear"
PUBLISHED = MODELS["kimi-linear-48b-a3b"].config
OF_LAYERS = PUBLISHED["linear_attn_config"]


def test_the_published_config_means_the_same(fixture_folder, tmp_path):
    """Layers counted from 1 in two lists, and other names of sizes."""
    folder = fixture_folder(NAME)
    shutil.copy(folder / "model.safetensors", tmp_path)
    shutil.copy(fixture_folder("kimi_linear_raw") / "config.json", tmp_path)
    one, other = load_model(tmp_path, jnp.float32), load_model(folder, jnp.float32)
    assert one.config == other.config
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    attending = [i for i, kind in enumerate(config.layer_types) if kind == LATENT_ATTENTION]
    assert attending == [3, 7, 11, 15, 19, 23, 26] and config.num_full_attention_layers == 7
    assert config.layer_types.count(KIMI_DELTA) == 20
    assert config.feed_forward_types == (DENSE,) + (SPARSE,) * 26
    assert config.rope is None and config.max_position_embeddings == 1048576
    assert config.part(KimiDeltaConfig) == KimiDeltaConfig(32, 128, 4, 128)
    latent, experts = config.part(LatentAttentionConfig), config.part(MoEConfig)
    assert (latent.query_rank, latent.width, latent.eps) == (None, 576, 1e-6)
    assert latent.scale == 192**-0.5
    assert experts.shared_size == experts.intermediate_size == 1024 and experts.has_correction
    assert (experts.routing.score, experts.routing.scale) == ("sigmoid", 2.446)


def test_experts_may_be_in_some_layers_only():
    config = parse_config(PUBLISHED | {"first_k_dense_replace": 3, "moe_layer_freq": 2})
    sparse = [i for i, kind in enumerate(config.feed_forward_types) if kind == SPARSE]
    assert sparse == list(range(4, 27, 2))


def test_each_device_has_whole_heads():
    local = parse_config(PUBLISHED).local(4).part(KimiDeltaConfig)
    assert (local.heads, local.channels, local.rank) == (8, 1024, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "`mla_use_nope` must be True, got False"),
        ({"moe_router_activation_func": "softmax"}, "`moe_router_activation_func` must be 'sig"),
        ({"num_nextn_predict_layers": 1}, "`num_nextn_predict_layers` must be 0, got 1"),
        ({"linear_attn_config": {**OF_LAYERS, "full_attn_layers": [4]}}, "each of layers 1 to 27"),
        (
            {"linear_attn_config": {**OF_LAYERS, "kda_layers": [0]}},
            "`linear_attn_config.kda_layers",
        ),
        ({"linear_attn_config": None}, "must give `linear_attn_config.kda_layers`, and does not"),
        ({"layer_types": ["full_attention"] * 26}, "each of 27 layers"),
        ({"layer_types": ["conv"] * 27}, "`layer_types` must name 'linear_attention' or"),
        ({"mlp_layer_types": ["moe"] * 27}, "`mlp_layer_types` must name 'dense' or 'sparse'"),
        ({"num_expert_group": 3}, "256 is not a multiple of 3"),
        ({"q_lora_rank": 0}, "`q_lora_rank` must be an integer from 1"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)
