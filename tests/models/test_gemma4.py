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
    DOUBLE_DENSE,
    FULL_ATTENTION,
    SHARED_FULL,
    SHARED_SLIDING,
    SLIDING_ATTENTION,
    ProportionalScaling,
)
from jaxspec.models.gemma4 import Gemma4, LogitCap
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.per_layer_input import PerLayerSizes
from jaxspec.models.layers.rope import frequencies
from jaxspec.models.layers.window_attention import SharedWindow, WindowShare
from jaxspec.pallas.matmul.activation import Activation

DENSE_MODEL, MOE_MODEL, E2B, E4B = (
    MODELS[f"gemma-4-{size}"].config for size in ("31b", "26b-a4b", "e2b", "e4b")
)
KINDS = (*[SLIDING_ATTENTION] * 5, FULL_ATTENTION)
SHARED_KINDS = (*[SHARED_SLIDING] * 5, SHARED_FULL)


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


def test_published_configurations_with_shared_keys_and_values_are_read():
    small, large = parse_config(E2B), parse_config(E4B)
    assert small.layer_types == KINDS[1:] * 3 + SHARED_KINDS[1:] * 4
    assert small.feed_forward_types == (DENSE,) * 15 + (DOUBLE_DENSE,) * 20
    assert large.layer_types == KINDS * 4 + SHARED_KINDS * 3
    assert large.feed_forward_types == (DENSE,) * 42
    for config, kv_heads in ((small, 1), (large, 2)):
        assert (config.window, config.num_heads) == (512, 8)
        for kind, head_dim in zip(KINDS[-2:] + SHARED_KINDS[-2:], [256, 512] * 2, strict=True):
            sizes = config.of_mixer(kind)
            assert (sizes.num_kv_heads, sizes.head_dim) == (kv_heads, head_dim)
            assert not sizes.keys_are_values
        assert config.part(PerLayerSizes) == PerLayerSizes(256, 262144)
    # The last layers with their own, and the last that read these.
    assert small.part(SharedWindow) == SharedWindow(13, 33)
    assert large.part(SharedWindow) == SharedWindow(22, 40)
    assert small.num_full_attention_layers == 3 and large.num_full_attention_layers == 4


def test_one_layer_lends_its_window_and_the_last_reader_writes_the_ring():
    config = parse_config(E2B)
    shares = [config.of_layer(index).find_part(WindowShare) for index in range(35)]
    assert [index for index, share in enumerate(shares) if share.lends] == [13]
    assert [index for index, share in enumerate(shares) if not share.keeps] == [*range(13, 33)]


def test_shared_layers_have_no_cache(fixture_folder):
    """Windows in layers 0 and 2, pages in 1 and 3; the others read those of 2 and 3."""
    layers = load_model(fixture_folder("gemma4_shared"), jnp.float32).trunk.layers
    assert [layer.owns_cache for layer in layers] == [True] * 4 + [False] * 3
    assert [layer.cache_layer for layer in layers if layer.owns_cache] == [0, 0, 1, 1]


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
    ("name", "total", "active"),
    [
        soak("31b", 30.7e9, 30.7e9),
        ("26b-a4b", 25.2e9, 3.8e9),
        # Without the towers, which are 0.5 billion of the published 5.1 and 8.
        ("e2b", 4.63e9, 2.28e9),
        soak("e4b", 7.46e9, 4.64e9),
    ],
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
        ({"num_kv_shared_layers": 55}, "a layer of each kind .* 55 of 60 .* no full_attention"),
        ({"num_kv_shared_layers": 60}, "`num_kv_shared_layers` must be .* to 59.*, got 60"),
        ({"hidden_size_per_layer_input": 256}, "must give `vocab_size_per_layer_input`"),
        (
            {"use_double_wide_mlp": True, "enable_moe_block": True},
            "`use_double_wide_mlp` must be false with `enable_moe_block`",
        ),
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


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("layers.15.self_attn.k_proj.weight", False),
        ("layers.19.self_attn.v_proj.weight", False),
        ("layers.34.self_attn.k_norm.weight", False),
        ("layers.34.self_attn.v_norm.weight", False),
        ("layers.15.self_attn.q_proj.weight", True),
        ("layers.15.self_attn.q_norm.weight", True),
        ("layers.14.self_attn.k_proj.weight", True),
        ("layers.13.self_attn.v_proj.weight", True),
        ("layers.15.per_layer_input_gate.weight", True),
        ("embed_tokens_per_layer.weight", True),
    ],
)
def test_keys_and_values_of_shared_layers_are_not_read(name, is_read):
    expected = f"model.{name}" if is_read else None
    assert Gemma4.canonical_name(f"model.language_model.{name}", parse_config(E2B)) == expected


@pytest.mark.soak
def test_a_ring_that_is_written_before_its_last_reader_is_seen(
    monkeypatch, fixture_folder, reference, single_request
):
    of_layer = SharedWindow.of_layer

    def early(shared, index):
        share = of_layer(shared, index)
        return dataclasses.replace(share, keeps=share.keeps or share.lends)

    monkeypatch.setattr(SharedWindow, "of_layer", early)
    model, expected = (each("gemma4_shared") for each in (fixture_folder, reference))
    model = load_model(model, jnp.float32)
    _, logits = single_request(model).prefill(expected["prompt_ids"], 33)  # longer than the ring
    assert np.abs(logits - expected["logits_full"][: len(logits)]).max() > 0.1


def test_logits_are_bounded(fixture_folder):
    model = load_model(fixture_folder("gemma4"), jnp.float32)
    cap = model.config.part(LogitCap).cap
    hidden = 1e3 * jnp.ones((1, model.config.hidden_size), jnp.float32)
    assert float(jnp.abs(model.logits(hidden)).max()) <= cap == 8.0
