"""Falcon-H1's files: multipliers are in the weights, norms may be missing or spelled otherwise."""

from gguf_files import write_gguf
from gguf_folders import FLOAT32, assert_same_model

from jaxspec.models import load_model
from jaxspec.models.falcon_h1 import FalconMultipliers
from jaxspec.models.layers.mamba2 import Mamba2Config


def test_greedy_ids_are_the_folder_s(tmp_path, single_request):
    assert_same_model("falcon_h1", tmp_path, single_request)


def test_no_multiplier_counts_twice(tmp_path):
    config = load_model(write_gguf("falcon_h1", tmp_path / "x.gguf"), FLOAT32).config
    assert set(vars(config.part(FalconMultipliers)).values()) == {1.0}
    assert config.part(Mamba2Config).multipliers == (1.0,) * 5


def test_the_norm_behind_mamba2_may_be_missing(tmp_path):
    def change(tensors):
        for layer in range(3):
            del tensors[f"blk.{layer}.ssm_norm.weight"]

    config = load_model(write_gguf("falcon_h1", tmp_path / "x.gguf", change=change), FLOAT32).config
    sizes = config.part(Mamba2Config)
    assert sizes.norm_groups == 0 and sizes.gate_first


def test_the_norm_of_the_feed_forward_layer_has_two_names(tmp_path):
    def change(tensors):
        assert "blk.0.ffn_norm" in tensors
        tensors["blk.0.ffn_norm.weight"] = tensors.pop("blk.0.ffn_norm")

    load_model(write_gguf("falcon_h1", tmp_path / "x.gguf", change=change), FLOAT32)
