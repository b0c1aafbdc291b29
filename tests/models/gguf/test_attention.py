"""Llama's and Qwen3's files: what is specific to them, beside the laws of all (test_checkpoint)."""

import numpy as np
import pytest
from gguf_files import write_gguf

from jaxspec.gguf.file import GGUFFile
from jaxspec.models.gguf.architectures import described
from jaxspec.models.gguf.attention import rotated_by_pairs
from jaxspec.models.gguf.fields import read_fields


def test_only_llama_s_queries_and_keys_are_turned_back(tmp_path):
    with GGUFFile(write_gguf("llama", tmp_path / "x.gguf")) as file:
        conversions = rotated_by_pairs(described(file))
    assert conversions.keys() == {f"attn_{x}.{kind}" for x in "qk" for kind in ("weight", "bias")}
    np.testing.assert_array_equal(conversions["attn_k.weight"].rows(8), [0, 2, 1, 3, 4, 6, 5, 7])


def test_experts_are_renormalised_unless_the_file_says_otherwise(tmp_path):
    for given, expected in ((None, True), (True, True), (False, False)):
        entries = {"qwen3moe.expert_weights_norm": given}
        path = write_gguf("qwen3_moe", tmp_path / "x.gguf", entries=entries)
        assert read_fields(path).entries["norm_topk_prob"] is expected


def test_key_heads_are_as_many_in_each_layer(tmp_path):
    entries = {"llama.attention.head_count_kv": [2, 2]}
    path = write_gguf("llama", tmp_path / "x.gguf", entries=entries)
    with pytest.raises(ValueError, match="`llama.attention.head_count_kv` must be an integer"):
        read_fields(path)
