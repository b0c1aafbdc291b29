"""Granite: dense and tied checkpoints, its config.json, factors that fold into weights."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import Oracle
from safetensors.numpy import load_file, save_file

from benchmarks.published import MODELS
from jaxspec.models import load_model, parse_config
from jaxspec.models.config import DENSE, FULL_ATTENTION, MAMBA2
from jaxspec.models.granite import GraniteMultipliers

# The fields that jaxspec reads of Granite-4.0-H-1B's, and some that it does not.
PUBLISHED = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": [("attention" if i % 10 == 5 else "mamba") for i in range(40)],
    "logits_scaling": 6,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "shared_intermediate_size": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}

ATTENDING = MODELS["granite-3.3-8b"].config


def variant(folder, drop, **changes):
    """The checkpoint in `folder` without some tensors, and with other fields."""
    held = load_file(folder / "model.safetensors")
    held = {name: value for name, value in held.items() if not any(x in name for x in drop)}
    save_file(held, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("drop", "changes"),
    [
        (["block_sparse_moe"], {"num_local_experts": 0}),
        (["lm_head"], {"tie_word_embeddings": True}),
        (["block_sparse_moe", "lm_head"], {"num_local_experts": 0, "tie_word_embeddings": True}),
    ],
    ids=["dense", "tied", "dense and tied"],
)
def test_other_checkpoints_are_as_the_oracle_has_them(
    tmp_path, fixture_folder, reference, single_request, drop, changes
):
    folder = shutil.copytree(fixture_folder("granitemoehybrid"), tmp_path / "model")
    variant(folder, drop, **changes)
    ids = reference("granitemoehybrid")["prompt_ids"][:20]
    _, logits = single_request(load_model(folder, jnp.float32)).prefill(ids)
    run = Oracle(folder).start()
    expected = np.stack([run.feed(int(token)) for token in ids])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-4)


def test_the_published_spelling_of_the_configuration_means_the_same(fixture_folder, tmp_path):
    folder = shutil.copytree(fixture_folder("granitemoehybrid"), tmp_path / "model")
    one = load_model(folder, jnp.float32)
    shutil.copy(fixture_folder("granitemoehybrid_raw") / "config.json", folder / "config.json")
    other = load_model(folder, jnp.float32)
    assert one.config == other.config
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    assert [config.layer_types.count(kind) for kind in (MAMBA2, FULL_ATTENTION)] == [36, 4]
    assert config.feed_forward_types == (DENSE,) * 40 and config.intermediate_size == 4096
    assert config.rope is None and config.head_dim == 128
    multipliers, mamba2 = config.parts
    assert multipliers == GraniteMultipliers(12.0, 0.22, 0.0078125 * 128**0.5, 6.0)
    assert mamba2.heads.channels == 3328 and mamba2.norm_groups == 1
    rotated = parse_config(PUBLISHED | {"position_embedding_type": "rope"})
    assert rotated.rope is not None and rotated.rope.rotary_dim == 128


def test_a_published_configuration_with_attention_alone_is_read():
    config = parse_config(ATTENDING)
    assert config.layer_types == (FULL_ATTENTION,) * 40 and config.intermediate_size == 12800
    assert config.rope.rotary_dim == config.head_dim == 128 and not config.normed_heads
    assert config.parts == (GraniteMultipliers(12.0, 0.22, 0.0078125 * 128**0.5, 16.0),)
    assert config.attention_biases == ()
    biased = parse_config(ATTENDING | {"attention_bias": True})
    assert biased.attention_biases == ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 39}, "for each of 40 layers; it has 39 entries"),
        ({"layer_types": ["conv"] * 40}, "the unknown kinds \\['conv'\\]"),
        ({"mamba_proj_bias": True}, "`mamba_proj_bias` must be False, got True"),
        ({"normalization_function": "layernorm"}, "`normalization_function` must be 'rmsnorm'"),
        ({"position_embedding_type": "alibi"}, "`position_embedding_type` must be 'nope' or"),
        ({"residual_multiplier": 0}, "`residual_multiplier` must be a number from 1e-06"),
        ({"num_local_experts": 8}, "`num_experts_per_tok` must be an integer from 1 to 8, got 0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fixture", "ends"),
    [
        ("granitemoehybrid", "q_proj.weight"),
        ("granitemoehybrid", "norm.weight"),
        ("granitemoehybrid", "out_proj.weight"),
        ("granitemoehybrid", "down_proj"),
        ("granite", "q_proj.bias"),
        ("granite", "o_proj.bias"),
    ],
)
def test_the_reference_sees_a_factor_that_is_left_out(
    fixture, ends, reference, fixture_folder, single_request, monkeypatch
):
    expected = reference(fixture)
    real = GraniteMultipliers.of_tensors

    def forgetful(self, *, tied):
        factors = real(self, tied=tied)
        return {end: factor for end, factor in factors.items() if not end.endswith(ends)}

    monkeypatch.setattr(GraniteMultipliers, "of_tensors", forgetful)
    model = load_model(fixture_folder(fixture), jnp.float32)

    _, logits = single_request(model).prefill(expected["prompt_ids"])
    assert np.abs(logits - expected["logits_full"][: len(logits)]).max() > 0.05
