"""Llama's config.json in each spelling, and tied embeddings."""

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
from jaxspec.models.config import Llama3Scaling

# The fields that jaxspec reads of Llama-3.2-1B's, and some that it does not.
PUBLISHED = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


@pytest.fixture
def copied(tmp_path, fixture_folder):
    """A fixture's copy with other fields of config.json, those of None taken away."""

    def copy(name, **changes):
        folder = shutil.copytree(fixture_folder(name), tmp_path / "model")
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_the_older_spelling_means_the_same(kind, copied, fixture_folder):
    published = json.loads((fixture_folder("llama") / "config.json").read_text())
    scaling = dict(published["rope_parameters"])
    theta = scaling.pop("rope_theta")
    scaling[kind] = scaling.pop("rope_type")
    folder = copied(
        "llama", architectures=None, rope_parameters=None, rope_theta=theta, rope_scaling=scaling
    )
    one, other = load_model(folder, jnp.float32), load_model(fixture_folder("llama"), jnp.float32)
    assert one.config.architecture == "llama" and one.config.rope == other.config.rope
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_checkpoint_may_ask_for_yarn(name, copied, single_request):
    """Beyond the original context, too."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    folder = copied(name, rope_parameters={"rope_theta": 1e4, **yarn})
    run, ids = Oracle(folder).start(), np.arange(40) * 5 % 256
    _, logits = single_request(load_model(folder, jnp.float32)).prefill(ids, 16)
    wanted = np.stack([run.feed(token) for token in ids])
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=5e-4)


def test_the_embedding_serves_as_head_where_the_two_are_tied(copied, single_request):
    folder = copied("llama_draft", tie_word_embeddings=True)
    held = load_file(folder / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"]
    save_file(held, folder / "model.safetensors")
    _, separate = single_request(load_model(folder, jnp.float32)).prefill(np.arange(9))
    del held["lm_head.weight"]
    save_file(held, folder / "model.safetensors")
    tied = load_model(folder, jnp.float32)
    assert tied.trunk.embedding is None
    _, logits = single_request(tied).prefill(np.arange(9))
    np.testing.assert_allclose(logits, separate, rtol=0, atol=1e-5)


def test_queries_and_keys_have_no_norms(fixture_folder):
    model = load_model(fixture_folder("llama"), jnp.float32)
    assert all(layer.mixer.norms is None for layer in model.trunk.layers)


def test_frequencies_that_an_older_checkpoint_stores_are_passed_over(copied):
    folder = copied("llama_draft")
    held = load_file(folder / "model.safetensors")
    held["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(held, folder / "model.safetensors")
    assert load_model(folder, jnp.float32).config.num_full_attention_layers == 2


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    assert config.rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert (config.rope.theta, config.rope.rotary_dim, config.head_dim) == (5e5, 64, 64)
    assert config.layer_types == ("full_attention",) * 16 and config.tie_word_embeddings
    assert not (config.normed_heads or config.gated_attention or config.zero_centred_norms)
    without = {name: value for name, value in PUBLISHED.items() if name != "head_dim"}
    assert parse_config(without) == config


def test_biases_of_attention_are_read(copied, single_request):
    folder = copied("llama_draft", attention_bias=True)
    held = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [name for name in held if "self_attn" in name]:
        rows = held[name].shape[0]
        held[name.replace("weight", "bias")] = rng.normal(size=rows).astype(np.float32)
    save_file(held, folder / "model.safetensors")
    run = Oracle(folder).start()
    expected = np.stack([run.feed(token) for token in range(9)])
    _, logits = single_request(load_model(folder, jnp.float32)).prefill(np.arange(9))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-4)


def test_the_base_of_llama_2_is_not_in_its_config():
    older = {name: value for name, value in PUBLISHED.items() if not name.startswith("rope")}
    assert parse_config(older | {"rope_scaling": None}).rope.theta == 1e4


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mlp_bias", True, "`mlp_bias` must be False, got True, .* Use a checkpoint"),
        ("sliding_window", 4096, "`sliding_window` must be absent, got 4096, .* Use a checkpoint"),
        ("hidden_act", "gelu", "`hidden_act` must be 'silu' or"),
        ("quantization_config", {"bits": 4}, "must give `quantization_config.quant_method`"),
        ("layer_types", ["sliding_attention"] * 16, "unknown kinds .*sliding_attention"),
        ("layer_types", ["linear_attention"] * 16, "attention layers only"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope type.* got 'linear'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | {name: value})
