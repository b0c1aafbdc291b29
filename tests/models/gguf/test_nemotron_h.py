"""Nemotron's files: what each block is, and a draft head that is passed over."""

import numpy as np
import pytest
from gguf_files import write_gguf
from gguf_folders import FLOAT32, assert_same_model, published

from jaxspec.models import load_model
from jaxspec.models.gguf.fields import read_fields

NAMES = ["nemotron_h", "nemotron_h_moe", "nemotron_h_latent"]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_the_folder_s(name, tmp_path, single_request):
    assert_same_model(name, tmp_path, single_request)


def pattern(name, tmp_path, **options):
    folder = tmp_path / name
    folder = folder if folder.exists() else published(name, folder)
    return read_fields(write_gguf(folder, tmp_path / "x.gguf", **options)).entries


def test_blocks_are_what_their_sizes_say(tmp_path):
    assert pattern("nemotron_h", tmp_path)["hybrid_override_pattern"] == "M*-M"
    assert pattern("nemotron_h_moe", tmp_path)["hybrid_override_pattern"] == "ME*ME"
    entries = {"nemotron_h.feed_forward_length": [0, 0, 96, 48]}
    with pytest.raises(ValueError, match=r"Missing|Wrong shape"):
        folder = tmp_path / "nemotron_h"
        load_model(write_gguf(folder, tmp_path / "y.gguf", entries=entries), FLOAT32)


def test_routing_is_what_the_metadata_says(tmp_path):
    found = pattern("nemotron_h_latent", tmp_path)
    assert found["n_group"] == 2 and found["topk_group"] == 1 and found["norm_topk_prob"] is True
    assert found["routed_scaling_factor"] == 2.5 and found["moe_latent_size"] == 24
    names = ("weights_scale", "weights_norm", "group_count", "group_used_count")
    absent = {f"nemotron_h_moe.expert_{name}": None for name in names}
    found = pattern("nemotron_h_latent", tmp_path, entries=absent)
    assert found["n_group"] == found["topk_group"] == found["routed_scaling_factor"] == 1
    assert found["norm_topk_prob"] is False  # llama.cpp's, where the metadata is silent


def test_a_draft_head_is_passed_over(tmp_path):
    """Its block has tensors of attention, experts and the head."""

    def drafting(tensors):
        for own in ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_q.weight", "ffn_norm"):
            tensors[f"blk.5.{own}"] = np.zeros((64, 64), np.float32)

    entries = {"nemotron_h_moe.nextn_predict_layers": 1, "nemotron_h_moe.block_count": 6}
    entries["nemotron_h_moe.attention.head_count_kv"] = [0, 0, 2, 0, 0, 2]
    entries["nemotron_h_moe.feed_forward_length"] = [0, 40, 0, 0, 40, 40]
    folder = published("nemotron_h_moe", tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "x.gguf", change=drafting, entries=entries)
    model = load_model(path, FLOAT32)
    assert model.draft_head is None and len(model.trunk.layers) == 5


def test_experts_are_scored_by_sigmoids_alone(tmp_path):
    entries = {"nemotron_h_moe.expert_gating_func": 1}
    with pytest.raises(ValueError, match="`nemotron_h_moe.expert_gating_func` must be 2, got 1"):
        pattern("nemotron_h_moe", tmp_path, entries=entries)
