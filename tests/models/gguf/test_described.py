"""Described: entries for each layer, and the draft block behind them."""

import contextlib

import numpy as np
import pytest
from gguf_files import write_gguf

from jaxspec.gguf.file import GGUFFile
from jaxspec.models.gguf.architectures import described
from jaxspec.models.kinds import whole

WIDTHS = whole(0, 100)


@contextlib.contextmanager
def model(tmp_path, fixture="llama", **entries):
    layers = {"llama.block_count": 2} if fixture == "llama" else {}
    path = write_gguf(fixture, tmp_path / "x.gguf", entries=layers | entries)
    with GGUFFile(path) as file:
        yield described(file)


def test_an_entry_is_for_all_layers_or_for_each(tmp_path):
    name = "feed_forward_length"
    with model(tmp_path, **{f"llama.{name}": 7}) as found:
        assert found.by_layer(name, WIDTHS) == [7, 7] and found.one_of_layers(name) == 7
    with model(tmp_path, **{f"llama.{name}": [0, 7]}) as found:
        assert found.by_layer(name, WIDTHS) == [0, 7] and found.one_of_layers(name) == 7
    with model(tmp_path, **{f"llama.{name}": [0, 0]}) as found:
        assert found.one_of_layers(name) is None
    with (
        model(tmp_path, **{f"llama.{name}": [5, 7]}) as found,
        pytest.raises(ValueError, match=r"must be the same in all .* got \[5, 7\]"),
    ):
        found.one_of_layers(name)


def test_key_heads_are_one_number_or_the_same_for_each_layer(tmp_path):
    name = "llama.attention.head_count_kv"
    for value in (2, [2, 2]):
        with model(tmp_path, **{name: value}) as found:
            assert found.key_heads() == {"num_key_value_heads": 2}
    for value, rule in (([2, 4], "must be the same in all blocks"), ([0, 2], "must be an integer")):
        with model(tmp_path, **{name: value}) as found, pytest.raises(ValueError, match=rule):
            found.key_heads()


@pytest.mark.parametrize("value", [[1], [1, 2, 3], [1, 101], [0.5, 1.0], ["x", "y"]])
def test_another_number_or_kind_of_values_is_refused(value, tmp_path):
    with (
        model(tmp_path, **{"llama.feed_forward_length": value}) as found,
        pytest.raises(ValueError, match="x.gguf: `llama.feed_forward_length` must be an integer"),
    ):
        found.by_layer("feed_forward_length", WIDTHS)


def test_the_draft_block_is_no_layer(tmp_path):
    with model(tmp_path, "qwen3_5") as found:
        assert (found.num_layers, found.num_draft_blocks) == (4, 1)
        listed = np.array([1, 2, 3, 4, 5], np.uint32)
        found.sizes.entries = {"x": listed, **found.sizes.entries}
        assert found.by_layer("x", WIDTHS) == [1, 2, 3, 4]
        assert found.has("ssm_conv1d.weight") and not found.has("ssm_conv1d.bias")


def test_heads_are_evenly_cut_unless_the_file_gives_their_size(tmp_path):
    absent = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    with model(tmp_path, **absent) as found:
        assert found.head_dim() == 64 // 4
