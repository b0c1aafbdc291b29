"""Qwen3-Next's config.json and layout of projections; its logits are in test_reference.py."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxspec.models import load_model, parse_config
from jaxspec.models.config import DENSE, SPARSE
from jaxspec.models.layers.moe import MoEConfig


@pytest.fixture
def published(fixture_folder):
    """A config.json as Qwen published it, as a dict to edit."""
    return json.loads((fixture_folder("qwen3_next_raw") / "config.json").read_text())


def test_the_published_config_means_the_same(published, fixture_folder, tmp_path):
    """Flat rope fields, neither `layer_types` nor a word of the draft head."""
    folder = fixture_folder("qwen3_next")
    shutil.copy(folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert not {"layer_types", "rope_parameters", "mtp_num_hidden_layers"} & published.keys()
    one, other = load_model(tmp_path, jnp.float32), load_model(folder, jnp.float32)
    assert one.config == other.config and one.has_draft_head
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_projections_are_published_head_by_head_and_kept_side_by_side(fixture_folder):
    """Two key heads of 16 channels; each serves two value heads of 24."""
    folder = fixture_folder("qwen3_next")
    model = load_model(folder, jnp.float32)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.linear_attn."
    heads = tensors[prefix + "in_proj_qkvz.weight"].reshape(2, 16 + 16 + 48 + 48, 64)
    weights = np.split(heads, [16, 32, 80], axis=1)  # q, k, v, z
    heads = tensors[prefix + "in_proj_ba.weight"].reshape(2, 2 + 2, 64)
    weights += np.split(heads, 2, axis=1)
    expected = np.concatenate([part.reshape(-1, 64) for part in weights]).T
    kept = np.asarray(model.trunk.layers[0].mixer.in_proj.weight.array[...])
    np.testing.assert_array_equal(kept[:, : expected.shape[1]], expected)
    assert not kept[:, expected.shape[1] :].any()


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, {1}),
        ({"mlp_only_layers": []}, set()),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, set()),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {0, 2, 3}),
    ],
)
def test_the_layers_without_experts_are_named_or_come_at_an_interval(published, changes, dense):
    kinds = parse_config(published | changes).feed_forward_types
    assert kinds == tuple(DENSE if index in dense else SPARSE for index in range(4))


def test_the_size_of_dense_layers_is_asked_for_where_there_are_any(published):
    del published["intermediate_size"]
    with pytest.raises(ValueError, match="must give `intermediate_size`, and does not"):
        parse_config(published)
    assert parse_config(published | {"mlp_only_layers": []}).intermediate_size == 0


def test_whether_weights_are_renormalised_is_never_guessed(published):
    assert parse_config(published).part(MoEConfig).routing.renormalise
    published["norm_topk_prob"] = False
    assert not parse_config(published).part(MoEConfig).routing.renormalise
    del published["norm_topk_prob"]
    with pytest.raises(ValueError, match="must give `norm_topk_prob`, and does not"):
        parse_config(published)
