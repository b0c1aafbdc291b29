"""ARCHITECTURES: every entry leads to a family, and names tensors as the package `gguf` does."""

import gguf
import pytest
from gguf_bytes import STRING, entry, gguf_file, text
from gguf_files import write_gguf

from jaxspec.gguf.file import GGUFFile
from jaxspec.models import MODELS
from jaxspec.models.gguf.architectures import ARCHITECTURES, architecture_of

BY_NAME = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


# What the converter renames before it asks for GGUF's name.
RENAMED = {
    "dt_bias": "dt_proj.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "expert_bias": "expert_bias.bias",
}
# Published as one tensor, which the converter cuts or joins without asking for GGUF's name; and
# names of older converters.
CUT = {
    "granite": {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_inp"},
    "qwen3next": {"attn_qkv"},
    "falcon-h1": {"ffn_norm.weight"},
}
UNREAD = {"rope_freqs", "dense_2", "blk.0.attn_rot_embd"}
OTHERS = {
    "llama": {
        f"blk.0.ffn_{x}" for x in ("gate_inp", "gate_exps", "up_exps", "down_exps")
    },  # Mixtral
    "qwen3next": {"blk.0.attn_gate"},  # joined with attn_qkv
}


def stem(own):
    return own.removesuffix(".weight").removesuffix(".bias")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensors_are_called_as_llama_cpp_s_converter_calls_them(name):
    architecture = ARCHITECTURES[name]
    assert architecture.published in MODELS
    names = gguf.get_tensor_name_map(BY_NAME[name], 1)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[BY_NAME[name]]}
    known = {each.replace("{bid}", "0") for each in known}
    cut = CUT.get(name.replace("granitemoe", "granite").replace("granitehybrid", "granite"), ())
    for own, published in architecture.blocks.items():
        for old, new in RENAMED.items():
            published = published.replace(old, new)
        if own in cut or f"blk.0.{stem(own)}" not in known:
            continue  # a table may serve two architectures
        found = names.get_name(f"{architecture.layer}0.{published}", (".weight", ".bias"))
        assert found is not None and stem(found) == f"blk.0.{stem(own)}", own
    for own, published in architecture.outside.items():
        if stem(own) in known and own not in ("output_norm.weight", "token_embd_norm.weight"):
            assert names.get_name(published, (".weight",)) == own
    used = {f"blk.0.{stem(own)}" for own in (*architecture.blocks, *architecture.stacks)}
    assert used | set(map(stem, architecture.outside)) >= known - UNREAD - OTHERS.get(name, set())


def test_the_tensors_of_a_draft_head_are_called_as_the_package_calls_them():
    known = {name.replace("blk.{bid}.", "") for name in gguf.TENSOR_NAMES.values()}
    for architecture in ARCHITECTURES.values():
        assert known >= {stem(own) for own in architecture.draft_head}


def test_an_architecture_outside_the_table_is_refused_by_name(tmp_path):
    path = tmp_path / "x.gguf"
    for value, rule in (
        ("deepseek2", "must be one of falcon-h1, .*, got 'deepseek2'. Use a model of one of those"),
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
