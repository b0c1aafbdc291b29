"""Qwen3-Next's and Qwen3.5's files: heads in turns or by key head, the draft head, older files."""

import re

import gguf_files
import numpy as np
import pytest
from gguf_files import write_gguf
from gguf_folders import FLOAT32, assert_same_model, published
from safetensors.numpy import load_file

from jaxspec.models import load_model
from jaxspec.models.gguf.checkpoint import GGUFCheckpoint
from jaxspec.models.gguf.fields import read_fields


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_next"])
def test_greedy_ids_are_the_folder_s(name, tmp_path, single_request):
    assert_same_model(name, tmp_path, single_request)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_any_stretch_of_a_reordered_tensor_is_that_of_the_whole(name, kind, tmp_path):
    """Rows in turns, columns in turns, and rows of two tensors."""
    folder = published(name, tmp_path / "folder")
    held = load_file(folder / "model.safetensors")
    parts = ["in_proj_qkv", "in_proj_z", "out_proj", "conv1d"] if name == "qwen3_5" else []
    parts += ["in_proj_qkvz"] if name == "qwen3_next" else []
    with GGUFCheckpoint(write_gguf(folder, tmp_path / "x.gguf", kind)) as checkpoint:
        for part in parts:
            tensor = f"model.layers.0.linear_attn.{part}.weight"
            stored = checkpoint.stored(tensor)
            assert stored.shape == held[tensor].shape
            dtype = {"F32": np.float32, "F16": np.float16}[stored.dtype]
            whole = np.empty(held[tensor].size, dtype)
            checkpoint.read(tensor, 0, whole)
            expected = held[tensor].astype(np.float32).reshape(-1)
            np.testing.assert_allclose(whole, expected, atol=0 if kind == "F32" else 0.02)
            rng = np.random.default_rng(0)
            for first in rng.integers(0, whole.size - 1, 8):
                piece = np.empty(rng.integers(1, whole.size - first + 1), dtype)
                checkpoint.read(tensor, int(first), piece)
                np.testing.assert_array_equal(piece, whole[first : first + piece.size])


def test_a_tensor_of_two_types_is_read_in_float32(tmp_path, monkeypatch):
    """Queries, keys and values in float16, z in float32."""
    monkeypatch.setattr(gguf_files, "_SMALL", re.compile("attn_gate"))
    folder = published("qwen3_next", tmp_path / "folder")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    expected = load_file(folder / "model.safetensors")[name].astype(np.float32)
    with GGUFCheckpoint(write_gguf(folder, tmp_path / "x.gguf", "F16")) as checkpoint:
        assert checkpoint.stored(name).dtype == "F32"
        found = np.empty(expected.size, np.float32)
        checkpoint.read(name, 0, found)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-4)


def test_an_older_file_has_the_projection_as_it_was_published(tmp_path):
    folder = published("qwen3_next", tmp_path / "folder")
    held = load_file(folder / "model.safetensors")

    def older(tensors):
        for layer in (0, 1):
            del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
            own = held[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
            tensors[f"blk.{layer}.ssm_in.weight"] = own.astype(np.float32)

    models = [write_gguf(folder, tmp_path / "x.gguf", change=older), folder]
    one, other = (load_model(path, FLOAT32).trunk.layers[0] for path in models)
    np.testing.assert_array_equal(
        one.mixer.in_proj.weight.array[...], other.mixer.in_proj.weight.array[...]
    )


def test_gate_and_up_may_come_as_one_stack(tmp_path):
    def fused(tensors):
        for block in range(5):
            pair = [tensors.pop(f"blk.{block}.ffn_{x}_exps.weight") for x in ("gate", "up")]
            tensors[f"blk.{block}.ffn_gate_up_exps.weight"] = np.concatenate(pair, axis=1)

    paths = [write_gguf("qwen3_5_moe", tmp_path / "x.gguf", change=fused)]
    paths.append(write_gguf("qwen3_5_moe", tmp_path / "y.gguf"))
    one, other = (load_model(path, FLOAT32).trunk.layers[0].feed_forward for path in paths)
    np.testing.assert_array_equal(one.experts.up.array[...], other.experts.up.array[...])


def test_a_quantised_file_may_leave_out_axes_of_one(tmp_path):
    """The gate of the shared expert is a matrix of one row, which llama-quantize makes a vector."""

    def flat(tensors):
        for name in [name for name in tensors if "gate_inp_shexp" in name]:
            tensors[name] = tensors[name].reshape(-1)

    load_model(write_gguf("qwen3_5_moe", tmp_path / "x.gguf", change=flat), FLOAT32)


def test_the_draft_head_is_one_more_block(tmp_path):
    path = write_gguf("qwen3_5", tmp_path / "x.gguf")
    entries = read_fields(path).entries
    assert entries["num_hidden_layers"] == 4 and entries["mtp_num_hidden_layers"] == 1
    assert load_model(path, FLOAT32).draft_head is not None

    def without(tensors):
        for name in [name for name in tensors if name.startswith("blk.4.")]:
            del tensors[name]

    none = {"qwen35.nextn_predict_layers": None, "qwen35.block_count": 4}
    path = write_gguf("qwen3_5", tmp_path / "y.gguf", change=without, entries=none)
    assert load_model(path, FLOAT32).draft_head is None
    path = write_gguf("qwen3_5", tmp_path / "z.gguf", entries=none)
    with pytest.raises(ValueError, match=r"Unexpected \(15\): gguf:blk\.4\.attn_k"):
        load_model(path, FLOAT32)


WRONG = {
    "qwen35.ssm.inner_size": (145, "must be a multiple of `qwen35.ssm.time_step_rank`, the 6 hea"),
    "qwen35.ssm.state_size": (None, "must give `qwen35.ssm.state_size`"),
    "qwen35.ssm.group_count": (0, "must be an integer from 1"),
    "qwen35.attention.recurrent_layers": ([1, 1, 1, 0], "must be absent"),
    "qwen35.expert_count": (8, "must be 0, got 8"),
    "qwen35.block_count": (1, "must be an integer from 2 to"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_named(name, tmp_path):
    value, rule = WRONG[name]
    path = write_gguf("qwen3_5", tmp_path / "x.gguf", entries={name: value})
    with pytest.raises(ValueError) as caught:
        load_model(path, FLOAT32)
    assert rule in str(caught.value) and f"`{name}`" in str(caught.value)


def test_sizes_that_lie_are_refused_by_the_shapes_that_they_ask_for(tmp_path):
    for name, value in (("group_count", 3), ("time_step_rank", 4), ("state_size", 8)):
        entries = {f"qwen35.ssm.{name}": value}
        path = write_gguf("qwen3_5", tmp_path / "x.gguf", entries=entries)
        with pytest.raises(ValueError, match="Wrong shape .* instead of"):
            load_model(path, FLOAT32)


def test_a_part_of_the_projection_that_is_missing_is_named(tmp_path):
    folder = published("qwen3_next", tmp_path / "folder")
    for name, values in (("gone", None), ("narrow", np.zeros((96, 8), np.float32))):

        def change(tensors, values=values):
            tensors["blk.0.attn_gate.weight"] = values
            if values is None:
                del tensors["blk.0.attn_gate.weight"]

        path = write_gguf(folder, tmp_path / f"{name}.gguf", change=change)
        with pytest.raises(ValueError, match=r"in_proj_qkvz.*gguf:blk\.0\.attn_qkv\.weight"):
            load_model(path, FLOAT32)
