"""Falcon-H1: what its checkpoints differ in, two mixers on one matrix, its config.json."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import Oracle
from safetensors.numpy import load_file, save_file

from jaxspec.cache import CacheOptions, Snapshot
from jaxspec.models import load_model, parse_config
from jaxspec.models.config import PARALLEL
from jaxspec.models.falcon_h1 import FalconMultipliers
from jaxspec.models.layers.mamba2 import Mamba2Config
from jaxspec.pallas.mamba2.step import why_not_kernel

NAME = "falcon_h1"
# The fields that jaxspec reads of a config.json of Falcon-H1-1.5B's form, and some that it does
# not.
PUBLISHED = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 4608,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "sliding_window": None,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.5, 0.25, 0.5, 0.5, 0.5],
    "ssm_out_multiplier": 0.25,
    "tie_word_embeddings": False,
    "vocab_size": 65537,
}


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def loaded(fixture_folder, reference):
    return load_model(fixture_folder(NAME), jnp.float32), reference(NAME)


@pytest.fixture
def edited(fixture_folder, tmp_path):
    """A copy of the fixture with other fields of config.json, and without some tensors."""

    def edit(*dropped, **changes):
        folder = shutil.copytree(fixture_folder(NAME), tmp_path / "model")
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        held = load_file(folder / "model.safetensors")
        kept = {name: x for name, x in held.items() if not name.endswith(dropped or ("!",))}
        save_file(kept, folder / "model.safetensors")
        return folder

    return edit


@pytest.mark.soak
@pytest.mark.parametrize(
    ("dropped", "changes"),
    [
        (("mamba.norm.weight",), {"mamba_rms_norm": False}),
        ((), {"mamba_norm_before_gate": True}),
        (("lm_head.weight",), {"tie_word_embeddings": True}),
        ((), {"attention_in_multiplier": 1.3, "key_multiplier": 0.2, "ssm_out_multiplier": 2}),
    ],
    ids=["no norm", "norm before the gate", "tied", "other multipliers"],
)
def test_what_checkpoints_differ_in(dropped, changes, edited, single_request):
    """Against the equations, in which multipliers stand at the activations."""
    folder = edited(*dropped, **changes)
    run, ids = Oracle(folder).start(), np.arange(3, 250, 11)
    expected = np.stack([run.feed(int(token)) for token in ids])
    _, logits = single_request(load_model(folder, jnp.float32)).prefill(ids, 9)
    assert_close(logits, expected, 2e-4)


def test_a_layer_has_one_matrix_before_its_mixers_and_one_behind_them(loaded):
    """None is kept a second time, and each mixer's layer of a pool is that of the other."""
    model, _ = loaded
    for mixer in (layer.mixer for layer in model.trunk.layers):
        assert mixer.mamba.in_proj.weight is mixer.attention.qkv.weight is mixer.in_proj.weight
        assert mixer.mamba.out_proj.weight is mixer.attention.out.weight is mixer.out_proj.weight
        assert mixer.in_proj.weight.shape == (64, 384 + 256)  # padded: 294
        assert mixer.out_proj.weight.shape == (96 + 128, 64)
    leaves = jax.tree.leaves(nnx.state(model))
    assert len({id(leaf) for leaf in leaves}) == len(leaves) == 3 + 3 * 10
    options = CacheOptions(*[jnp.dtype("float32")] * 3, Snapshot())
    assert {spec.name: spec.layers for spec in model.cache_specs(options)} == {
        "recurrent": 3,
        "kv": 3,
    }


def test_a_mixers_own_projection_is_its_part_of_the_common_one(loaded):
    model, _ = loaded
    mixer = model.trunk.layers[1].mixer
    x = jax.random.normal(jax.random.key(0), (5, 64))
    parts = mixer.in_proj.split(mixer.in_proj.joined(x))
    for part, own in zip(parts, (mixer.mamba.in_proj, mixer.attention.qkv), strict=False):
        assert_close(part, own.joined(x), 1e-6)
    outs, widths = (mixer.mamba.out_proj, mixer.attention.out), (96, 128)
    heads = [jax.random.normal(jax.random.key(width), (5, width)) for width in widths]
    both = mixer.out_proj.joined(jnp.concatenate(heads, axis=1))
    assert_close(both, sum(out.joined(y) for out, y in zip(outs, heads, strict=True)), 1e-5)


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    assert config.layer_types == (PARALLEL,) * 24 and config.num_full_attention_layers == 24
    assert not config.normed_heads and config.rope.rotary_dim == 128
    sizes, factors = config.part(Mamba2Config), config.part(FalconMultipliers)
    assert sizes.heads == (48, 64, 1, 256) and sizes.norm_groups == 0
    assert sizes.multipliers == (0.625, 0.3125, 0.625, 0.625, 0.625)
    assert factors.mlp_gate == 0.8838834764831844 and factors.key == 0.390625


def test_what_the_configuration_does_not_say_is_as_transformers_has_it():
    silent = {name: x for name, x in PUBLISHED.items() if "multiplier" not in name}
    for name in ("mamba_norm_before_gate", "mamba_rms_norm"):
        del silent[name]
    sizes, factors = (parse_config(silent).part(part) for part in (Mamba2Config, FalconMultipliers))
    assert sizes.multipliers == (1.0,) * 5 and set(factors.of_tensors(tied=True).values()) == {1.0}
    assert not sizes.gate_first and sizes.norm_groups == 0


def test_no_kernel_takes_states_of_256():
    """As 1.5B and larger have them: XLA computes these, on a GPU too."""
    states, x = jnp.zeros((1, 1, 1, 1, 64, 256)), jnp.zeros((1, 1, 1, 64))
    assert "64 x 256" in why_not_kernel(x, states)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: True}, f"`{name}` must be False, got True")
            for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
        ),
        ({"mamba_d_ssm": 4096}, "`mamba_d_ssm` must be mamba_n_heads \\* mamba_d_head, 3072, got"),
        ({"mlp_multipliers": [1.0]}, "`mlp_multipliers` must be a list of 2, each a number"),
        ({"ssm_multipliers": [1.0] * 4 + [0]}, "`ssm_multipliers` must be a list of 5, each a"),
        ({"key_multiplier": 0.0}, "`key_multiplier` must be a number from 1e-06 to 1e\\+06"),
        ({"time_step_limit": [0.001, 0.1]}, "`time_step_limit` must be absent, or 0 and inf"),
        ({"sliding_window": 4096}, "`sliding_window` must be absent"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)
