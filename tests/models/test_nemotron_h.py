"""Nemotron-H: step sizes that nobody clamps, and its config.json."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import Oracle
from safetensors.numpy import save_file

import jaxspec
from jaxspec.models import load_model, parse_config
from jaxspec.models.config import FULL_ATTENTION, LATENT_SPARSE, MAMBA2, NO_MIXER, SPARSE
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.nemotron_h import NemotronH
from jaxspec.models.weights import undefined

FILE = "model.safetensors"
PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
# The fields that jaxspec reads of Nemotron-3-Nano-30B-A3B's, and some that it does not.
PUBLISHED = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": [2, 11],
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": PATTERN,
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.soak
def test_step_sizes_are_not_clamped(fixture_folder, reference, single_request):
    """transformers clamps them where it computes whole prompts, and not where it decodes."""
    model = load_model(fixture_folder("nemotron_h_dtclamp"), jnp.float32)
    expected = reference("nemotron_h_dtclamp")
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    run = Oracle(fixture_folder("nemotron_h_dtclamp")).start()
    ids = np.concatenate([prompt, greedy])
    plain = np.stack([run.feed(int(token)) for token in ids])
    _, logits = single_request(model).prefill(ids)
    assert_close(logits, plain, 5e-4)
    assert np.abs(plain - expected["logits_full"]).max() > 0.01


def test_the_published_spelling_of_the_configuration_means_the_same(
    fixture_folder, tmp_path, reference
):
    folder = shutil.copytree(fixture_folder("nemotron_h_latent"), tmp_path / "model")
    published = fixture_folder("nemotron_h_latent_raw") / "config.json"
    one = load_model(folder, jnp.float32)
    shutil.copy(published, folder / "config.json")
    other = load_model(folder, jnp.float32)
    assert one.config == other.config and other.has_draft_head
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    assert [config.layer_types.count(kind) for kind in (MAMBA2, FULL_ATTENTION)] == [23, 6]
    assert config.feed_forward_types.count(SPARSE) == config.layer_types.count(NO_MIXER) == 23
    assert config.rope is None and config.num_draft_layers == 0 and config.intermediate_size == 0
    mamba2, experts = config.parts
    assert mamba2.heads.channels == 6144 and mamba2.norm_groups == 8
    assert experts.rule.num_shared == 2 and experts.routing.scale == 2.5


def test_a_latent_mixture_is_another_layer():
    config = parse_config(PUBLISHED | {"moe_latent_size": 1024})
    assert config.feed_forward_types[1] == config.draft_feed_forward_type == LATENT_SPARSE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M" * 51}, "each of 52 layers, 1 to 1,000, got 51"),
        ({"hybrid_override_pattern": "MX" * 26}, "letters of 'M\\*-E', .*got \\['X'\\]"),
        (
            {"hybrid_override_pattern": None},
            "must give `hybrid_override_pattern` or `layers_block_type`",
        ),
        ({"mlp_hidden_act": "silu"}, "`mlp_hidden_act` must be 'relu2', got 'silu'"),
        ({"n_shared_experts": 2}, "`n_shared_experts` must be 1, got 2"),
        ({"use_bias": True}, "`use_bias` must be False, got True"),
        ({"mamba_proj_bias": True}, "`mamba_proj_bias` must be False, got True"),
        ({"sliding_window": 512}, "`sliding_window` must be absent, got 512"),
        ({"time_step_limit": [0.001, 0.1]}, "does not clamp step sizes"),
        ({"mamba_num_heads": 60}, "mamba_num_heads, n_groups: 60 is not a multiple of 8"),
        ({"num_experts_per_tok": 200}, "`num_experts_per_tok` must be an integer from 1 to 128"),
        ({"n_group": 7}, "n_routed_experts, n_group: 128 is not a multiple of 7"),
        (
            {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "ME"},
            "`mtp_hybrid_override_pattern` or `mtp_layers_block_type` must be '\\*E'",
        ),
        ({"num_nextn_predict_layers": 2}, "`num_nextn_predict_layers` must be .* from 0 to 1"),
        (
            {"layers_block_type": ["mamba"] * 52},
            "`hybrid_override_pattern` and `layers_block_type` mean the same, and differ",
        ),
        (
            {"mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": ["moe", "attention"]},
            "`mtp_hybrid_override_pattern` and `mtp_layers_block_type` mean the same, and differ",
        ),
        (
            {"attention_head_dim": 64},
            "`head_dim` and `attention_head_dim` mean the same, and differ: 128 and 64",
        ),
        ({"head_dim": None}, "config.json must give `head_dim`"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)


def test_fields_of_two_names_may_have_both_or_the_older_one():
    config = parse_config(PUBLISHED)
    older = {name: value for name, value in PUBLISHED.items() if name != "head_dim"}
    assert parse_config(older | {"attention_head_dim": 128}) == config
    assert parse_config(PUBLISHED | {"attention_head_dim": 128}) == config
    kinds = {"M": "mamba", "E": "moe", "*": "attention"}
    listed = [kinds[letter] for letter in PATTERN]
    assert parse_config(PUBLISHED | {"layers_block_type": listed}) == config


# Trunks that lack one of the two layers of the draft head, or both, and the fields they lack.
ATTENTION = ["num_attention_heads", "num_key_value_heads", "head_dim"]
EXPERTS = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"]
EXPERTS += ["moe_shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor"]
LACKING = [("MEME", ATTENTION), ("M*M*", EXPERTS), ("M-M-", ATTENTION + EXPERTS)]


def shortened(pattern, lacking=(), **changes):
    config = {name: value for name, value in PUBLISHED.items() if name not in lacking}
    return config | {"hybrid_override_pattern": pattern, "num_hidden_layers": 4} | changes


@pytest.mark.parametrize(("pattern", "lacking"), LACKING)
def test_a_promised_head_brings_the_sizes_that_the_trunk_lacks(pattern, lacking):
    plain = parse_config(shortened(pattern, lacking))
    assert (plain.num_heads == 0) == ("*" not in pattern)
    assert (plain.find_part(MoEConfig) is None) == ("E" not in pattern)
    config = parse_config(shortened(pattern, num_nextn_predict_layers=1))
    assert config.num_heads == 32 and config.part(MoEConfig).intermediate_size == 1856
    model = undefined(NemotronH, config, jnp.dtype("float32"), None)
    assert model.has_draft_head
    for name in lacking:
        promised = shortened(pattern, [name], num_nextn_predict_layers=1)
        with pytest.raises(ValueError, match=f"config.json must give `{name}`"):
            parse_config(promised)


@pytest.mark.parametrize(("pattern", "lacking"), LACKING)
def test_a_head_without_sizes_is_refused_by_config_json(tmp_path, pattern, lacking):
    """Nothing promises it, and its tensors are there."""
    config = shortened(pattern, lacking)
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = *(f"backbone.layers.{i}.norm.weight" for i in range(4)), "mtp.layers.0.enorm.weight"
    save_file({name: np.zeros(2688, np.float32) for name in names}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"config\.json must promise the draft head .*`head_dim`"):
        load_model(tmp_path, jnp.float32)
    (reason,) = jaxspec.inspect(tmp_path).refused
    assert "`num_nextn_predict_layers` 1" in reason


def test_a_head_is_found_by_its_tensors(fixture_folder, tmp_path):
    """Some re-exports promise one in config.json, and have none."""
    folder = shutil.copytree(fixture_folder("nemotron_h"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert load_model(folder, jnp.float32).has_draft_head
