"""Granite's files: multipliers from the metadata, positions, layers that attend."""

import pytest
from gguf_files import write_gguf
from gguf_folders import FLOAT32, assert_same_model, published

from jaxspec.models import load_model
from jaxspec.models.gguf.fields import read_fields
from jaxspec.models.granite import GraniteMultipliers

NAMES = ["granitemoehybrid", "granite_dense", "granite", "granitemoe"]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_the_folder_s(name, tmp_path, single_request):
    assert_same_model(name, tmp_path, single_request)


@pytest.mark.parametrize("name", NAMES)
def test_multipliers_and_positions_are_the_folder_s(name, tmp_path):
    folder = published(name, tmp_path / "folder")
    paths = write_gguf(folder, tmp_path / "x.gguf"), folder
    one, other = (load_model(path, FLOAT32).config for path in paths)
    assert one.part(GraniteMultipliers) == other.part(GraniteMultipliers)
    assert one.rope == other.rope and one.head_dim == other.head_dim


def test_without_multipliers_there_are_none(tmp_path):
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    for value in (None, 0.0):
        entries = {f"granitehybrid.{name}": value for name in names}
        path = write_gguf("granitemoehybrid", tmp_path / "x.gguf", entries=entries)
        config = load_model(path, FLOAT32).config
        # Scores of heads of 16 are scaled by a quarter, as everywhere: queries get no other factor.
        assert config.part(GraniteMultipliers) == GraniteMultipliers(1.0, 1.0, 1.0, 1.0)


WRONG = {
    "attention.head_count_kv": ([0, 0, 2], "or 4 of them, one for each block, got [0, 0, 2]"),
    "attention.scale": ("x", "must be a number from 0"),
    "rope.scaling.finetuned": (1, "must be true or false"),
    "feed_forward_length": (None, "must give `granitehybrid.feed_forward_length`"),
    "expert_used_count": (None, "must give `granitehybrid.expert_used_count`"),
    "ssm.group_count": (None, "must give `granitehybrid.ssm.group_count`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_named(name, tmp_path):
    value, rule = WRONG[name]
    entries = {f"granitehybrid.{name}": value}
    path = write_gguf("granitemoehybrid", tmp_path / "x.gguf", entries=entries)
    with pytest.raises(ValueError) as caught:
        read_fields(path)
    assert rule in str(caught.value) and f"`granitehybrid.{name}`" in str(caught.value)


def test_another_order_of_layers_is_refused_by_their_tensors(tmp_path):
    entries = {"granitehybrid.attention.head_count_kv": [2, 0, 0, 0]}
    path = write_gguf("granitemoehybrid", tmp_path / "x.gguf", entries=entries)
    with pytest.raises(ValueError, match=r"Missing \(\d+\): model\.layers\.0\.self_attn"):
        load_model(path, FLOAT32)
