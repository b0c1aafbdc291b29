"""A model's source: a folder is read as a folder, and a GGUF file as one."""

import pytest
from gguf_files import write_gguf
from harness import FIXTURES

from jaxspec.models.checkpoint import SafetensorsCheckpoint
from jaxspec.models.fields import overridden
from jaxspec.models.gguf.checkpoint import GGUFCheckpoint
from jaxspec.models.source import naming, open_checkpoint, read_fields


def test_folders_and_files_give_the_same(tmp_path):
    folder, path = FIXTURES / "llama", write_gguf("llama", tmp_path / "x.gguf")
    assert read_fields(path).architecture == read_fields(folder).architecture
    with open_checkpoint(folder) as one, open_checkpoint(path) as other:
        assert type(one) is SafetensorsCheckpoint and type(other) is GGUFCheckpoint
        assert one.names == other.names and one.path == folder and other.path == path
        assert [one.stored(n).shape for n in one.names] == [
            other.stored(n).shape for n in one.names
        ]


def test_an_error_about_a_config_json_names_the_file_that_stands_for_it(tmp_path):
    path = write_gguf("llama", tmp_path / "x.gguf")
    folder = FIXTURES / "llama"
    for source, words, expected in (
        (folder, "config.json: no", f"{folder}/config.json: no"),
        (folder, "It has no layers.", f"{folder}: It has no layers."),
        (folder, f"{folder}/x is no file.", f"{folder}/x is no file."),
        (path, "config.json: no", f"{path}, whose metadata stands for a config.json: config.json"),
    ):
        with pytest.raises(ValueError) as caught, naming(source):
            raise ValueError(words)
        assert str(caught.value).startswith(expected)


def test_a_folder_of_a_gguf_file_alone_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="has none. Give the folder of a Hugging Face"):
        read_fields(tmp_path)
    path = write_gguf("llama", tmp_path / "M.GGUF")
    with pytest.raises(FileNotFoundError, match=f"the GGUF file in it, give its path: {path}"):
        read_fields(tmp_path)
    assert read_fields(path).architecture


def test_overrides_replace_entries_of_config_json_alone(tmp_path):
    path = write_gguf("llama", tmp_path / "x.gguf")
    own = read_fields(FIXTURES / "llama", {"rope_theta": 5.0, "new": {"a": 1}})
    assert own.architecture == read_fields(FIXTURES / "llama", {}).architecture
    with pytest.raises(ValueError, match=r"x\.gguf is a GGUF file, got \{'rope_theta': 5\.0\}"):
        read_fields(path, {"rope_theta": 5.0})
    assert read_fields(path, {}).architecture == own.architecture


def test_objects_in_both_are_merged():
    published = {"a": 1, "text_config": {"b": 2, "c": {"d": 3, "e": 4}}, "other": None}
    overrides = {"a": [5], "text_config": {"c": {"d": 6}}, "other": {"f": 7}, "rope": {"g": 8}}
    assert overridden(published, overrides) == {
        "a": [5],
        "text_config": {"b": 2, "c": {"d": 6, "e": 4}},
        "other": {"f": 7},
        "rope": {"g": 8},
    }
    assert published["text_config"]["c"]["d"] == 3 and overridden([1], overrides) == [1]
