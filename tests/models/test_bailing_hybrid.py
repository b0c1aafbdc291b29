"""Ling-3.0 and its config.json in both spellings; limits of experts against the oracle."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import Oracle

from benchmarks.published import MODELS
from jaxspec.models import load_model, parse_config
from jaxspec.models.config import DENSE, KIMI_DELTA, LATENT_ATTENTION, SPARSE
from jaxspec.models.layers.kimi_delta import KimiDeltaConfig
from jaxspec.models.layers.latent_attention import LatentAttentionConfig
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.pallas.gated_delta.heads import channel_gates

NAME = "bailing_hybrid"
FLASH, TINY = (MODELS[f"ling-3.0-{size}"].config for size in ("flash", "tiny"))


def test_the_published_spelling_means_the_same(fixture_folder, tmp_path):
    """Groups of layers, other names of the routing, and a share of the delta rule's heads."""
    folder = fixture_folder(NAME)
    shutil.copy(folder / "model.safetensors", tmp_path)
    shutil.copy(fixture_folder("bailing_hybrid_raw") / "config.json", tmp_path)
    one, other = load_model(tmp_path, jnp.float32), load_model(folder, jnp.float32)
    assert one.config.parts == other.config.parts and one.config.rope == other.config.rope
    assert one.config.layer_types == other.config.layer_types
    assert one.has_draft_head and other.has_draft_head
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_published_configuration_of_flash_is_read():
    config = parse_config(FLASH)
    attending = [i for i, kind in enumerate(config.layer_types) if kind == LATENT_ATTENTION]
    assert attending == [5, 11, 17, 23, 29, 35, 41]
    assert config.layer_types.count(KIMI_DELTA) == 35
    assert config.feed_forward_types == (DENSE,) * 2 + (SPARSE,) * 40
    assert (config.rope.rotary_dim, config.rope.theta) == (64, 6e6)
    assert config.part(KimiDeltaConfig) == KimiDeltaConfig(32, 128, 4, None, -5.0)
    latent, experts = config.part(LatentAttentionConfig), config.part(MoEConfig)
    assert (latent.query_rank, latent.width, latent.gated) == (None, 576, True)
    assert latent.scale == 192**-0.5
    rule = experts.routing
    assert (rule.num_experts, rule.num_chosen, rule.groups, rule.top_groups) == (512, 8, 8, 4)
    assert (rule.score, rule.scale, experts.shared_size) == ("sigmoid", 2.5, 768)
    assert experts.has_correction
    assert (config.num_draft_layers, config.draft_mixer_type) == (1, LATENT_ATTENTION)
    assert config.draft_feed_forward_type == SPARSE
    of_layers = [config.of_layer(layer).part(MoEConfig).limits for layer in (33, 34, 36, 41, 42)]
    assert of_layers == [((0, 0),), ((0, 5),), ((4, 5),), ((4, 7),), ()]


def test_the_published_configuration_of_tiny_is_read():
    config = parse_config(TINY)
    assert config.layer_types == ((KIMI_DELTA,) * 3 + (LATENT_ATTENTION,)) * 6
    assert config.part(LatentAttentionConfig).query_rank == 256
    assert config.part(KimiDeltaConfig).channels == 2048
    assert config.part(MoEConfig).limits == ()


def test_each_device_has_whole_heads():
    local = parse_config(FLASH).local(4)
    assert (local.num_heads, local.part(KimiDeltaConfig).heads) == (8, 8)


def test_decays_are_bounded():
    f = jnp.asarray([[[-90.0, -0.5, 0.0, 2.0, 90.0]]])
    rates, bias = jnp.log(jnp.asarray([1.5])), jnp.full((1, 5), 0.25)
    g = channel_gates(f, rates, bias, -5.0)
    want = -5.0 / (1.0 + np.exp(-1.5 * (np.asarray(f, np.float64) + 0.25)))
    np.testing.assert_allclose(g, want, atol=1e-6)


def test_decays_may_be_those_of_kimi():
    config = parse_config(TINY | {"kda_safe_gate": False, "kda_lower_bound": None})
    assert config.part(KimiDeltaConfig).lower_bound is None


def test_limits_change_the_output_of_the_layers_that_have_them(
    fixture_folder, reference, tmp_path, single_request
):
    folder, expected = fixture_folder(NAME), reference(NAME)
    shutil.copy(folder / "model.safetensors", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["expert_swiglu_limit_list"] = [0, None, 0.05, 0.1]
    config["share_expert_swiglu_limit_list"] = [0, 0.2, 0, 0.3]
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = expected["prompt_ids"][:24]
    _, logits = single_request(load_model(tmp_path, jnp.float32)).prefill(prompt)
    run = Oracle(tmp_path).start()
    want = np.stack([run.feed(token) for token in prompt])
    np.testing.assert_allclose(logits, want, atol=5e-4)
    assert np.abs(want - expected["logits_full"][:24]).max() > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_mla_nope": True}, "`use_mla_nope` must be False, got True"),
        ({"no_kda_lora": False}, "`no_kda_lora` must be True, got False"),
        ({"mtp_use_kda": True}, "`mtp_use_kda` must be False, got True"),
        ({"score_function": "softmax"}, "`score_function` must be 'sigmoid', got 'softmax'"),
        (
            {"gated_attention_proj_granularity_type": "element_wise"},
            "`gated_attention_proj_granularity_type` must be 'head_wise', got 'element_wise'",
        ),
        ({"num_nextn_predict_layers": 2}, "`num_nextn_predict_layers` must be an integer from 0 "),
        ({"layer_group_size": None}, "must give `layer_group_size`, and does not"),
        ({"layer_types": ["conv"] * 42}, "`layer_types` must name 'linear_attention' or"),
        ({"kda_lower_bound": None}, "must give `kda_lower_bound`, and does not"),
        ({"kda_lower_bound": 0}, "`kda_lower_bound` must be a number from -100 to -0.001, got 0"),
        ({"head_dim": None}, "must give `head_dim`, and does not"),
        ({"n_group": 3}, "num_experts, n_group: 512 is not a multiple of 3"),
        (
            {"expert_swiglu_limit_list": [0, 4]},
            "`expert_swiglu_limit_list` must have no limits of dense layers, got .0, 4.",
        ),
        ({"share_expert_swiglu_limit_list": [-1]}, "each null or a number from 0 to 1000, got"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(FLASH | changes)
