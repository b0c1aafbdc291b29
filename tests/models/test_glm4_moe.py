"""GLM-4.5-Air and GLM-4.7-Flash: published configs, names of tensors, planted bugs."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxspec
from benchmarks.published import MODELS
from jaxspec.models import glm4_moe, load_model, parse_config
from jaxspec.models.config import (
    ATTENTION_PROJECTIONS,
    DENSE,
    FULL_ATTENTION,
    LATENT_ATTENTION,
    SPARSE,
)
from jaxspec.models.layers.latent_attention import LatentAttentionConfig
from jaxspec.models.layers.moe import MoEConfig

FLOAT32 = jnp.dtype("float32")
AIR, FLASH = MODELS["glm-4.5-air"].config, MODELS["glm-4.7-flash"].config


def test_the_published_configuration_of_air_is_read():
    config = parse_config(AIR)
    assert config.layer_types == (FULL_ATTENTION,) * 46
    assert config.feed_forward_types == (DENSE,) + (SPARSE,) * 45
    assert config.attention_biases == ("q_proj", "k_proj", "v_proj") and not config.normed_heads
    assert (config.head_dim, config.rope.rotary_dim, config.rope.theta) == (128, 64, 1e6)
    experts = config.part(MoEConfig)
    rule = experts.routing
    assert (rule.num_experts, rule.num_chosen, rule.groups) == (128, 8, 1)
    assert (rule.score, rule.scale, experts.shared_size) == ("sigmoid", 1.0, 1408)
    assert experts.has_correction
    assert (config.num_draft_layers, config.draft_mixer_type) == (1, FULL_ATTENTION)
    assert config.draft_feed_forward_type == SPARSE


def test_the_published_configuration_of_flash_is_read():
    config = parse_config(FLASH)
    assert config.layer_types == (LATENT_ATTENTION,) * 47
    assert config.feed_forward_types == (DENSE,) + (SPARSE,) * 46
    sizes = config.part(LatentAttentionConfig)
    assert (sizes.query_rank, sizes.rank, sizes.width, sizes.value_dim) == (768, 512, 576, 256)
    assert sizes.scale == pytest.approx(256**-0.5)
    assert (config.num_heads, config.rms_norm_eps, sizes.eps) == (20, 1e-5, 1e-6)
    rule = config.part(MoEConfig).routing
    assert (rule.num_experts, rule.num_chosen, rule.groups, rule.scale) == (64, 4, 1, 1.8)
    assert (config.num_draft_layers, config.draft_mixer_type) == (1, LATENT_ATTENTION)


def test_heads_are_normed_half_rotated_and_biased_as_config_json_has_it():
    assert parse_config(AIR | {"use_qk_norm": True}).normed_heads
    missing = {"use_qk_norm", "partial_rotary_factor", "attention_bias"}
    config = parse_config({name: value for name, value in AIR.items() if name not in missing})
    assert not config.normed_heads and config.attention_biases == ()
    assert config.rope.rotary_dim == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring_func": "softmax"}, "`scoring_func` must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "`topk_method` must be 'noaux_tc'"),
        ({"decoder_sparse_step": 2}, "`decoder_sparse_step` must be 1"),
        ({"sliding_window": 128}, "`sliding_window`"),
        ({"n_group": 3}, "not a multiple of 3"),
        ({"num_nextn_predict_layers": 2}, "`num_nextn_predict_layers` must be"),
        ({"layer_types": ["linear_attention"] * 46}, "`layer_types` must name 'full_attention'"),
        ({"first_k_dense_replace": None}, "must give `first_k_dense_replace`"),
        ({"rope_theta": None}, "must give `rope_theta`"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_config(AIR | fields)


@pytest.mark.parametrize("fixture", ["glm4_moe", "glm4_moe_lite"])
def test_the_draft_head_may_lack_its_copies(fixture, fixture_folder, tmp_path):
    """GLM-4.5 is published with them, GLM-4.6 without."""
    folder = shutil.copytree(fixture_folder(fixture), tmp_path / "model")
    held = load_file(folder / "model.safetensors")
    for name in ("shared_head.head.weight", "embed_tokens.weight"):
        held.pop(f"model.layers.3.{name}")
    save_file(held, folder / "model.safetensors")
    models = (load_model(each, FLOAT32) for each in (folder, fixture_folder(fixture)))
    one, other = (jax.tree.leaves(nnx.state(model)) for model in models)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("fixture", "mixer"), [("glm4_moe", "Attention"), ("glm4_moe_lite", "LatentAttention")]
)
def test_inspection_names_the_layers(fixture, mixer, fixture_folder):
    found = jaxspec.inspect(fixture_folder(fixture))
    assert found.refused == () and found.cache.token > 0
    assert found.layers == {f"{mixer} + GatedMLP": 1, f"{mixer} + MoE": 2}


# Planted bugs


def biases_of_no_use(fields, tensors):
    for name in tensors:
        if name.endswith("_proj.bias"):
            tensors[name][:] = 0


def heads_without_norms(fields, tensors):
    fields["use_qk_norm"] = False
    for name in [name for name in tensors if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        del tensors[name]


def heads_rotated_whole(fields, tensors):
    fields["rope_parameters"]["partial_rotary_factor"] = 1.0


def scores_without_their_correction(fields, tensors):
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name][:] = 0


def experts_without_their_factor(fields, tensors):
    fields["routed_scaling_factor"] = 1.0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "change",
    [
        biases_of_no_use,
        heads_without_norms,
        heads_rotated_whole,
        scores_without_their_correction,
        experts_without_their_factor,
    ],
)
def test_each_part_changes_the_logits(change, fixture_folder, tmp_path, reference, single_request):
    """So the reference would show a model that lacks it."""
    folder = shutil.copytree(fixture_folder("glm4_moe"), tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(fields, tensors)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    expected = reference("glm4_moe")
    _, logits = single_request(load_model(folder, FLOAT32)).prefill(expected["prompt_ids"])
    assert np.abs(logits - expected["logits_full"][: len(logits)]).max() > 0.05


def test_a_bias_of_the_output_projection_is_missed(monkeypatch, fixture_folder):
    """Llama's `attention_bias` has one; a family that expected it would find no tensor."""
    monkeypatch.setattr(glm4_moe, "_BIASES", ATTENTION_PROJECTIONS)
    with pytest.raises(ValueError, match="o_proj.bias"):
        load_model(fixture_folder("glm4_moe"), FLOAT32)
