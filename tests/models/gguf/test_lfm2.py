"""LFM2's files, with experts and without."""

import numpy as np
import pytest
from gguf_files import write_gguf
from gguf_folders import FLOAT32, assert_same_model, published

from jaxspec.models import load_model
from jaxspec.models.gguf.fields import read_fields


@pytest.mark.soak
@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
def test_greedy_ids_are_the_folder_s(name, tmp_path, single_request):
    assert_same_model(name, tmp_path, single_request)


def test_the_output_s_norm_may_have_either_name_and_not_both(tmp_path):
    def renamed(tensors):
        tensors["output_norm.weight"] = tensors.pop("token_embd_norm.weight")

    def both(tensors):
        tensors["output_norm.weight"] = np.ones(64, np.float32)

    load_model(write_gguf("lfm2", tmp_path / "x.gguf", change=renamed), FLOAT32)
    with pytest.raises(ValueError, match=r"Twice \(1\): model\.norm\.weight"):
        load_model(write_gguf("lfm2", tmp_path / "y.gguf", change=both), FLOAT32)


WRONG = {
    "attention.head_count_kv": ([0, 2, 4, 0], "must be the same in all blocks that have any"),
    "expert_gating_func": (1, "must be 2, got 1"),
    "leading_dense_block_count": (None, "must give `lfm2moe.leading_dense_block_count`"),
    "shortconv.l_cache": (0, "must be an integer from 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_named(name, tmp_path):
    value, rule = WRONG[name]
    folder = published("lfm2_moe", tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "x.gguf", entries={f"lfm2moe.{name}": value})
    with pytest.raises(ValueError) as caught:
        read_fields(path)
    assert rule in str(caught.value) and f"`lfm2moe.{name}`" in str(caught.value)
