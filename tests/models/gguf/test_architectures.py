"""ARCHITECTURES: every entry leads to a family, and names tensors as the package `gguf` does."""

import gguf
import pytest
from gguf_bytes import STRING, entry, gguf_file, text
from gguf_files import write_gguf

from jaxspec.gguf.file import GGUFFile
from jaxspec.models import MODELS
from jaxspec.models.gguf.architecture import OUTSIDE_BLOCKS
from jaxspec.models.gguf.architectures import ARCHITECTURES, architecture_of

BY_NAME = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensors_are_called_as_llama_cpp_s_converter_calls_them(name):
    architecture = ARCHITECTURES[name]
    assert architecture.published in MODELS
    names = gguf.get_tensor_name_map(BY_NAME[name], 1)
    for own, published in architecture.blocks.items():
        assert names.get_name(f"model.layers.0.{published}") == f"blk.0.{own}"
    for own, published in OUTSIDE_BLOCKS.items():
        assert names.get_name(published, (".weight",)) == own
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[BY_NAME[name]]}
    for own in (*architecture.blocks, *architecture.stacks):
        assert f"blk.{{bid}}.{own}" in known


def test_an_architecture_outside_the_table_is_refused_by_name(tmp_path):
    path = tmp_path / "x.gguf"
    for value, rule in (
        ("deepseek2", "must be one of llama, .*, got 'deepseek2'. Use a model of one of those"),
        ("\x1b[2J" + "y" * 500, r"got '\\x1b\[2Jy+\.\.\.\."),
    ):
        path.write_bytes(gguf_file([entry("general.architecture", STRING, text(value))]))
        with GGUFFile(path) as file, pytest.raises(ValueError, match=rule) as caught:
            architecture_of(file)
        assert "\x1b" not in str(caught.value)
    path.write_bytes(gguf_file())
    with GGUFFile(path) as file, pytest.raises(ValueError, match="must give `general.architect"):
        architecture_of(file)


def test_a_file_s_architecture_is_found(tmp_path):
    with GGUFFile(write_gguf("qwen3_moe", tmp_path / "x.gguf")) as file:
        assert architecture_of(file) == ("qwen3moe", ARCHITECTURES["qwen3moe"])
