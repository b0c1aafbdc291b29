"""Checkpoint: which files of a folder count, and an index that has to fit them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.models.checkpoint import SafetensorsCheckpoint, listed

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index, and a third file that it does not name."""
    for number, names in enumerate(["ab", "c", "d"], 1):
        tensors = {name: np.full(2, number, np.float32) for name in names}
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    index(tmp_path, a="model-1.safetensors", b="model-1.safetensors", c="model-2.safetensors")
    return tmp_path


def index(folder, **weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_says_which_files_count(folder):
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert checkpoint.names == {"a", "b", "c"}
        assert checkpoint.files_of("c") == ["model-2.safetensors"]
        assert (checkpoint.stored("c").dtype, checkpoint.stored("c").shape) == ("F32", (2,))
        checkpoint.read("c", 1, into := np.zeros(1, np.float32))
        np.testing.assert_array_equal(into, [2])
        checkpoint.check_unchanged()


def test_without_an_index_all_files_count(folder):
    (folder / INDEX).unlink()
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert checkpoint.names == {"a", "b", "c", "d"}


def test_the_files_may_be_links_out_of_the_folder(folder, tmp_path_factory):
    """As in the hub's cache: the index is judged by the names that it writes."""
    blob = tmp_path_factory.mktemp("blobs") / "blob"
    (folder / "model-1.safetensors").rename(blob)
    (folder / "model-1.safetensors").symlink_to(blob)
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert checkpoint.names == {"a", "b", "c"}


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "x/y.safetensors", "x", 1])
def test_an_index_stays_in_its_folder(folder, file):
    index(folder, a=file)
    with pytest.raises(
        ValueError, match=r"index\.json must name .* lie beside it, and puts 'a' in"
    ):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("changed", [{"e": "model-1.safetensors"}, {"c": "model-1.safetensors"}])
def test_an_index_that_puts_a_tensor_elsewhere_is_refused(folder, changed):
    index(folder, **{"a": "model-1.safetensors", "c": "model-2.safetensors", **changed})
    ((name, file),) = changed.items()
    with pytest.raises(ValueError, match=rf"not where it says: {name} \(in {file}\)\. Download"):
        SafetensorsCheckpoint(folder)


def test_an_index_that_names_absent_files_is_refused(folder):
    index(folder, **{f"t{i}": f"x{i}.safetensors" for i in range(9)})
    with pytest.raises(
        FileNotFoundError, match=r"lacks x0.safetensors, .*, x3.* and 5 more\. Down"
    ):
        SafetensorsCheckpoint(folder)


def test_names_are_listed_within_bounds_and_as_plain_text():
    assert listed(["a", "b"]) == "a, b"
    assert listed(["a"] * 2004) == "a, a, a, a and 2,000 more"
    assert listed(["\x1b[31m"]) == r"'\x1b[31m'"
    assert listed(["x" * 500]) == "x" * 100 + "..."
