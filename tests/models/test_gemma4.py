"""Gemma 4: its published config.json, sizes that are refused, the names of its tensors."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import soak

import jaxspec
from benchmarks.published import MODELS
from jaxspec.models import load_model, parse_config
from jaxspec.models.config import (
    DENSE,
    DENSE_AND_SPARSE,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    ProportionalScaling,
)
from jaxspec.models.gemma4 import Gemma4, LogitCap
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.rope import frequencies
from jaxspec.pallas.matmul.activation import Activation

DENSE_MODEL, MOE_MODEL = (MODELS[f"gemma-4-{size}"].config for size in ("31b", "26b-a4b"))
KINDS = (*[SLIDING_ATTENTION] * 5, FULL_ATTENTION)


def with_text(config, changes):
    return config | {"text_config": config["text_config"] | changes}


def test_published_configurations_are_read():
    dense, moe = parse_config(DENSE_MODEL), parse_config(MOE_MODEL)
    assert dense.layer_types == KINDS * 10 and moe.layer_types == KINDS * 5
    assert dense.feed_forward_types == (DENSE,) * 60
    assert moe.feed_forward_types == (DENSE_AND_SPARSE,) * 30
    for config, kv_heads, full_kv_heads in ((dense, 16, 4), (moe, 8, 2)):
        assert (config.window, config.activation) == (1024, Activation.GEGLU)
        assert config.normed_values and config.normed_outputs
        window, full = (config.of_mixer(kind) for kind in (SLIDING_ATTENTION, FULL_ATTENTION))
        assert (window.num_kv_heads, window.head_dim) == (kv_heads, 256)
        assert (full.num_kv_heads, full.head_dim) == (full_kv_heads, 512)
        assert full.keys_are_values and not window.keys_are_values
        assert full.rope.scaling == ProportionalScaling(64) and window.rope.scaling is None
        assert config.part(LogitCap).cap == 30.0
    experts = moe.part(MoEConfig)
    assert (experts.routing.num_experts, experts.routing.num_chosen) == (128, 8)
    unlisted = with_text(MOE_MODEL, {"layer_types": None})
    assert parse_config(unlisted) == moe
    shorter = with_text(MOE_MODEL, {"layer_types": None, "num_hidden_layers": 8})
    assert parse_config(shorter).layer_types == (*KINDS, SLIDING_ATTENTION, FULL_ATTENTION)


def test_the_text_of_a_unified_model_is_read_alike():
    """Gemma 4 12B, whose class and model type are others."""
    text = {"model_type": "gemma4_unified_text"}
    unified = with_text(DENSE_MODEL, text) | {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
    }
    found = parse_config(unified)
    assert found == dataclasses.replace(parse_config(DENSE_MODEL), architecture=found.architecture)


@pytest.mark.parametrize(
    ("name", "total", "active"), [soak("31b", 30.7e9, 30.7e9), ("26b-a4b", 25.2e9, 3.8e9)]
)
def test_published_models_have_the_published_numbers_of_parameters(name, total, active, tmp_path):
    published = MODELS[f"gemma-4-{name}"]
    found = jaxspec.inspect(published.write(tmp_path, published.config), load_format="dummy")
    assert found.refused == () and found.parameters is not None
    assert found.parameters.total == pytest.approx(total, rel=5e-3)
    assert found.parameters.active == pytest.approx(active, rel=1e-2)


def test_only_the_first_pairs_of_a_proportional_rotation_turn():
    rope = parse_config(DENSE_MODEL).full_rope
    turns = frequencies(rope)
    np.testing.assert_allclose(turns[:64], 1e6 ** (-np.arange(64) / 256), rtol=1e-6)
    assert turns.shape == (256,) and not turns[64:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20},
            "`hidden_size_per_layer_input` must be 0, got 256: .* Gemma 4 E2B and E4B",
        ),
        ({"num_kv_shared_layers": 20}, "`num_kv_shared_layers` must be 0, got 20: .* Use Gemma 4"),
        ({"use_bidirectional_attention": "all"}, "`use_bidirectional_attention` must be 'vision'"),
        ({"hidden_activation": "silu"}, "`hidden_activation` must be 'gelu_pytorch_tanh'"),
        ({"layer_types": [SLIDING_ATTENTION] * 59}, "for each of 60 layers; it has 59 entries"),
        ({"num_global_key_value_heads": 5}, "32 is not a multiple of 5"),
        ({"global_head_dim": None}, "must give `global_head_dim`"),
        ({"rope_parameters": {"full_attention": {}}}, "`rope_parameters.sliding_attention`"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "`per_layer_config` must give the layers"),
        ({"per_layer_config": {"5": {"hidden_size": 8}}}, "`per_layer_config.5.hidden_size`"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(with_text(DENSE_MODEL, changes))


def test_sizes_by_layer_are_those_of_all_layers_with_full_attention():
    """As transformers saves them."""
    sizes = {"head_dim": 512, "num_key_value_heads": 4}
    by_layer = {str(index): sizes for index in range(5, 60, 6)}
    changes = {"per_layer_config": by_layer, "global_head_dim": None}
    assert parse_config(with_text(DENSE_MODEL, changes)) == parse_config(DENSE_MODEL)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.vision_tower.patch_embedder.input_proj.weight", None),
        ("model.audio_tower.layers.0.norm.weight", None),
        ("model.embed_vision.embedding_projection.weight", None),
        ("model.vision_embedder.patch_dense.weight", None),
        (
            "model.language_model.layers.3.post_attention_layernorm.weight",
            "model.layers.3.post_attention_layernorm.weight",
        ),
        (
            "model.layers.3.pre_feedforward_layernorm_2.weight",
            "model.layers.3.mlp.input_norm.weight",
        ),
        ("model.layers.3.router.proj.weight", "model.layers.3.mlp.gate.weight"),
        ("model.layers.3.experts.down_proj", "model.layers.3.mlp.experts.down_proj"),
    ],
)
def test_tensors_have_the_names_of_layers(name, canonical):
    assert Gemma4.canonical_name(name, parse_config(MOE_MODEL)) == canonical


def test_logits_are_bounded(fixture_folder):
    model = load_model(fixture_folder("gemma4"), jnp.float32)
    cap = model.config.part(LogitCap).cap
    hidden = 1e3 * jnp.ones((1, model.config.hidden_size), jnp.float32)
    assert float(jnp.abs(model.logits(hidden)).max()) <= cap == 8.0
