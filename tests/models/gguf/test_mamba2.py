"""Mamba2's files: rates, and tensors whose shapes lie."""

import numpy as np
import pytest
from gguf_files import write_gguf
from gguf_folders import FLOAT32, assert_same_model

from jaxspec.models import load_model


def test_greedy_ids_are_the_folder_s(tmp_path, single_request):
    assert_same_model("mamba2", tmp_path, single_request)


def test_a_model_of_one_group_may_have_its_norm_flat(tmp_path):
    """llama-quantize leaves leading axes of 1 out; other shapes of as many values are refused."""

    def flat(tensors):
        tensors["blk.0.ssm_norm.weight"] = tensors["blk.0.ssm_norm.weight"].reshape(-1)

    load_model(write_gguf("mamba2", tmp_path / "x.gguf", change=flat), FLOAT32)


SHAPES = {
    "blk.0.ssm_a": ((4, 2), r"mixer\.A_log \[4, 2\] instead of \[8\]"),
    "blk.1.ssm_d": ((1, 8), r"mixer\.D \[1, 8\] instead of \[8\]"),
    "blk.1.ssm_dt.bias": ((8, 1), r"mixer\.dt_bias \[8, 1\] instead of \[8\]"),
    "blk.0.ssm_norm.weight": ((4, 32), r"mixer\.norm\.weight \[4, 32\] instead of \[128\]"),
    "blk.2.ssm_conv1d.weight": ((224, 2, 2), r"conv1d\.weight \[224, 2, 2\] instead of \[224, 1"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_another_shape_of_as_many_values_is_refused(name, tmp_path):
    shape, rule = SHAPES[name]

    def change(tensors):
        tensors[name] = tensors[name].reshape(shape)

    with pytest.raises(ValueError, match=rule):
        load_model(write_gguf("mamba2", tmp_path / "x.gguf", change=change), FLOAT32)


@pytest.mark.parametrize("value", [0.0, 0.5, np.nan, -np.inf])
def test_a_rate_that_no_logarithm_gives_is_refused(value, tmp_path):
    def change(tensors):
        tensors["blk.1.ssm_a"][3] = value

    path = write_gguf("mamba2", tmp_path / "x.gguf", change=change)
    rule = rf"x\.gguf: `blk\.1\.ssm_a` must hold negative numbers, got {value}\. Download the file"
    with pytest.raises(ValueError, match=rule):
        load_model(path, FLOAT32)


@pytest.mark.parametrize("name", ["conv_kernel", "state_size", "group_count", "time_step_rank"])
def test_sizes_are_needed_and_compared_with_the_tensors(name, tmp_path):
    for value, rule in ((None, f"must give `mamba2.ssm.{name}`"), (16, "Wrong shape|multiple of")):
        path = write_gguf("mamba2", tmp_path / "x.gguf", entries={f"mamba2.ssm.{name}": value})
        with pytest.raises(ValueError, match=rule):
            load_model(path, FLOAT32)


def test_without_biases_of_the_convolution_there_are_none(tmp_path):
    def change(tensors):
        for layer in range(3):
            del tensors[f"blk.{layer}.ssm_conv1d.bias"]

    model = load_model(write_gguf("mamba2", tmp_path / "x.gguf", change=change), FLOAT32)
    assert model.trunk.layers[0].mixer.conv_bias is None
