"""A model's source: a folder is read as a folder, and a GGUF file as one."""

import pytest
from gguf_files import write_gguf
from harness import FIXTURES

from jaxspec.models.checkpoint import SafetensorsCheckpoint
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
    for source, beginning in ((FIXTURES / "llama", "config.json"), (path, str(path))):
        with pytest.raises(ValueError) as caught, naming(source):
            raise ValueError("config.json must be right.")
        assert str(caught.value).startswith(beginning)


def test_a_folder_of_a_gguf_file_alone_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="has none. Give the folder of a Hugging Face"):
        read_fields(tmp_path)
    path = write_gguf("llama", tmp_path / "M.GGUF")
    with pytest.raises(FileNotFoundError, match=f"the GGUF file in it, give its path: {path}"):
        read_fields(tmp_path)
    assert read_fields(path).architecture
