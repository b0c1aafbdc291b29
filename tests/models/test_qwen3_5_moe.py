"""Qwen3.5 MoE in each published spelling; its logits are in test_reference.py."""

import dataclasses
import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.models import load_model, parse_config
from jaxspec.models.config import SPARSE
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.qwen3_5_moe import Qwen3_5Moe
from jaxspec.pallas.moe.route import Routing


def leaves(model):
    return jax.tree.leaves(nnx.state(model))


def assert_same_model(one, other):
    assert one.config == other.config
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def fused(tensors, prefix):
    """`tensors` with the experts under `prefix` in two tensors, as most checkpoints have them."""
    found = re.compile(re.escape(prefix) + r"(\d+)\.(gate|up|down)_proj\.weight")
    by_expert = {n: m.groups() for n in tensors if (m := found.fullmatch(n))}
    stacks = {
        kind: np.stack([tensors[f"{prefix}{i}.{kind}_proj.weight"] for i in range(8)])
        for kind in ("gate", "up", "down")
    }
    rest = {name: held for name, held in tensors.items() if name not in by_expert}
    both = np.concatenate([stacks["gate"], stacks["up"]], axis=1)
    return {**rest, prefix + "gate_up_proj": both, prefix + "down_proj": stacks["down"]}


@pytest.fixture
def published(fixture_folder):
    """A config.json, as a dict to edit."""
    return json.loads((fixture_folder("qwen3_5_moe") / "config.json").read_text())


def test_the_text_model_of_a_vision_language_checkpoint_reproduces_the_reference_logits(
    fixture_folder, reference, single_request
):
    expected = reference("qwen3_5_moe_vl")
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    model = load_model(fixture_folder("qwen3_5_moe_vl"), jnp.float32)
    assert model.has_draft_head
    _, logits = single_request(model).prefill(ids, 64)
    np.testing.assert_allclose(logits, expected["logits_full"], rtol=0, atol=5e-4)


def test_the_published_spelling_means_the_same(fixture_folder):
    """Experts in two tensors a layer, names of a vision-language checkpoint, no `layer_types`."""
    assert_same_model(
        *(load_model(fixture_folder(n), jnp.float32) for n in ("qwen3_5_moe", "qwen3_5_moe_raw"))
    )


@pytest.mark.parametrize("prefix", ["mtp.layers.0.mlp.experts.", "model.layers.2.mlp.experts."])
def test_each_layer_has_its_own_spelling_of_the_experts(fixture_folder, tmp_path, prefix):
    folder = shutil.copytree(fixture_folder("qwen3_5_moe"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(fused(tensors, prefix), folder / "model.safetensors")
    assert_same_model(
        load_model(folder, jnp.float32), load_model(fixture_folder("qwen3_5_moe"), jnp.float32)
    )


def test_every_layer_has_experts_and_one_that_all_tokens_share(published):
    assert "intermediate_size" not in published
    config = parse_config(published)
    assert config.feed_forward_types == (SPARSE,) * 4 and config.intermediate_size == 0
    experts = config.part(MoEConfig)
    assert experts == MoEConfig(
        Routing(8, 3), intermediate_size=32, shared_size=48, gated_shared=True
    )
    # Half as wide again as the others: two of their width.
    assert experts.rule == dataclasses.replace(experts.routing, num_shared=2, gated_shared=True)


def test_a_model_of_the_published_sizes_has_as_many_parameters_as_its_name_says(published):
    """35B-A3B, of Qwen3.5 and 3.6, whose config.json gives these; and 0.84 billion of its head."""
    config = published | {
        "layer_types": None,
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "vocab_size": 248320,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    model = nnx.eval_shape(lambda: Qwen3_5Moe(parse_config(config), jnp.dtype("bfloat16")))
    sizes = {p.name: math.prod(p.shape) for p in model.checkpoint()}
    head = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert round(head / 1e9, 2) == 0.84
    assert round((sum(sizes.values()) - head) / 1e9, 1) == 34.7


def test_another_number_of_experts_than_config_json_says_is_a_misfit(
    fixture_folder, tmp_path, published
):
    folder = shutil.copytree(fixture_folder("qwen3_5_moe"), tmp_path / "model")
    for count, fault in (
        (7, "Unexpected .15.: model.layers.0.mlp.experts.7."),
        (
            9,
            "Missing .15.: model.layers.0.mlp.experts.8.",
        ),
    ):
        config = json.dumps(published | {"num_experts": count})
        (folder / "config.json").write_text(config)
        with pytest.raises(ValueError, match=fault):
            load_model(folder, jnp.float32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "relu2"),
        ("norm_topk_prob", False),
        ("mlp_only_layers", [1]),
        ("decoder_sparse_step", 2),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("n_group", 8),
        ("topk_group", 4),
        ("routed_scaling_factor", 2.5),
        ("moe_latent_size", 1024),
        ("swiglu_limit", 7.0),
        ("num_experts_per_tok", 9),
        ("num_experts", 0),
        ("moe_intermediate_size", 0),
        ("shared_expert_intermediate_size", 0),
        ("shared_expert_intermediate_size", 2**20),
    ],
)
def test_what_is_not_implemented_or_malformed_is_refused_by_name(published, name, value):
    published[name] = value
    with pytest.raises(ValueError, match=f"`{name}` must"):
        parse_config(published)


def test_two_names_of_the_number_of_experts_may_not_differ(published):
    published["num_local_experts"] = 8
    assert parse_config(published).part(MoEConfig).routing.num_experts == 8
    published["num_local_experts"] = 16
    with pytest.raises(ValueError, match="`num_experts` and `num_local_experts` mean the same"):
        parse_config(published)
